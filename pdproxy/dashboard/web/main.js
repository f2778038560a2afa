// Puts it together. What has changed is drawn once a frame at the most, and times go on once a second.

const details = new Details((key) => fleet.focus(key));
const fleet = new Fleet((key) => details.open(key));
const flow = new Flow();
const slow = new Slow();

let due = null; // what the next frame has to draw

const link = new Link((patch) => {
  if (due === null) {
    due = { isWhole: false, parts: new Set(), changed: new Set() }; // everything; parts of the state; keys of cards
    requestAnimationFrame(draw);
  }
  if (patch === null) due.isWhole = true;
  for (const name of Object.keys(patch ?? {})) due.parts.add(name);
  for (const key of Object.keys(patch?.fleet ?? {})) due.changed.add(key);
});

function draw() {
  const state = link.state;
  const { isWhole, parts, changed } = due;
  due = null;
  const isOf = (...names) => isWhole || names.some((name) => parts.has(name));
  if (isOf("fleet", "proxy", "flow")) fleet.update(state, isWhole ? null : changed);
  if (isOf("flow")) flow.update(state);
  if (isOf("slow")) slow.update(state);
  details.update(state);
  tick();
}

function tick() {
  if (link.state === null || !link.isLive) return;
  const now = link.now();
  slow.tick(now);
  say(byId("about"), `pdproxy ${link.state.proxy.version}, up for ${age(now)}.`);
}

setInterval(tick, 1000);
