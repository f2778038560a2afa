// Puts it together. What has changed is drawn once a frame at the most, and times go on once a second.

const details = new Details();
const fleet = new Fleet((key) => details.open(key));
const flow = new Flow();
const slow = new Slow();

let isDue = false;
let isWhole = false; // everything may be different
let changed = new Set(); // keys of cards
let parts = new Set(); // of the state

const link = new Link((patch) => {
  if (patch === null) isWhole = true;
  else for (const name of Object.keys(patch)) parts.add(name);
  for (const key of Object.keys(patch?.fleet ?? {})) changed.add(key);
  if (!isDue) {
    isDue = true;
    requestAnimationFrame(draw);
  }
});

function draw() {
  const state = link.state;
  const isOf = (...names) => isWhole || names.some((name) => parts.has(name));
  if (isOf("fleet", "proxy", "flow")) fleet.update(state, isWhole ? null : changed);
  if (isOf("flow")) flow.update(state);
  if (isOf("slow")) slow.update(state);
  details.update(state);
  isDue = isWhole = false;
  changed = new Set();
  parts = new Set();
  tick();
}

function tick() {
  if (link.state === null || !link.isLive) return;
  const now = link.now();
  slow.tick(now);
  say(byId("about"), `pdproxy ${link.state.proxy.version}, up for ${age(now)}.`);
}

setInterval(tick, 1000);
