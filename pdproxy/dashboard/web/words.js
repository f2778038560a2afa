// How things are written: numbers, times and states in words.

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en");
const clockTime = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

const WELL = "ready";
const ROLES = { prefill: "Prefillers", decode: "Decoders" };
const PHASES = {
  receive: "Receive",
  tokenize: "Tokenize",
  slot_wait: "Wait for pages",
  prefill: "Prefill",
  kv_wait: "Wait for KV",
  first_byte: "First byte",
  decode: "Decode",
  passed: "Passed on",
  retry: "Next attempt",
};
const OUTCOMES = {
  done: "done",
  refused: "refused",
  failed: "failed",
  client_gone: "client left",
  shutdown: "shutdown",
};

/** 1 → "1 page", 2 → "2 pages" */
function count(number, noun) {
  return `${numbers.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Seconds, with as many digits as one can make use of. */
function duration(seconds) {
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  return `${seconds.toFixed(1)} s`;
}

/** Of something that goes on: whole units, that it does not flicker. */
function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole}\u00a0s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}\u00a0min ${String(whole % 60).padStart(2, "0")}\u00a0s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)}\u00a0h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}\u00a0min`;
  return `${Math.floor(whole / 86400)}\u00a0days`;
}

/** Touches the document only where something is different. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

function mark(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

/** element("p", "quiet", "text", child …) */
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Makes `items` all that is in `list`, in their order. What is in its place stays there, and so does the focus. */
function arrange(list, items) {
  const focused = document.activeElement;
  const wanted = new Set(items);
  for (const child of [...list.children]) if (!wanted.has(child)) child.remove();
  items.forEach((item, place) => {
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
  if (focused !== document.activeElement && list.contains(focused)) focused.focus();
}

/** A row each of [name, value]: a `dl`'s content, whose nodes are kept while the names stay the same. */
function fillPairs(list, pairs) {
  const names = pairs.map(([name]) => name).join("\n");
  if (list.names !== names) {
    list.names = names;
    list.replaceChildren(...pairs.map(([name]) => element("div", "", element("dt", "", name), element("dd", ""))));
  }
  pairs.forEach(([, value], place) => say(list.children[place].lastChild, value));
}
