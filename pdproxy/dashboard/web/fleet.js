// The fleet: a verdict first, then who needs attention, then everybody, by role.

const DENSE_FROM = 24; // instances of a role
const MAX_TROUBLES = 6;

class Group {
  constructor(role) {
    this.title = element("h2", "", ROLES[role] ?? role);
    this.sums = element("p", "quiet sums");
    this.list = element("ul", "cards");
    this.list.setAttribute("aria-label", ROLES[role] ?? role);
    this.node = element("div", "group", element("div", "group-head", this.title, this.sums), this.list);
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.list.addEventListener("focusin", (event) => this.enter(event.target.closest(".card")));
  }

  /** Their order in the document is by name, whichever came first. */
  arrange(entries) {
    entries.sort((a, b) => inOrder(a.card.name, b.card.name));
    arrange(this.list, entries.map(({ view }) => view.item));
    mark(this.node, "dense", String(entries.length >= DENSE_FROM));
    this.node.style.setProperty("--num", String(Math.max(1, entries.length)));
    this.keepEntrance();
  }

  summarize(cards) {
    const num = (test) => cards.filter(test).length;
    const sum = (name) => cards.reduce((total, card) => total + (card[name] ?? 0), 0);
    const parts = [`${num((card) => card.word === WELL)} of ${cards.length} ready`];
    if (sum("capacity") > 0) parts.push(`${numbers.format(sum("held"))} of ${numbers.format(sum("capacity"))} pages held`);
    if (sum("queue") > 0) parts.push(`${numbers.format(sum("queue"))} waiting`);
    if (sum("queued_tokens") > 0) parts.push(`${count(sum("queued_tokens"), "token")} to read`);
    say(this.sums, parts.join(" · "));
  }

  /** There always is a card to begin with, as long as any is shown; without any, nothing of the group is. */
  keepEntrance() {
    const shown = "li:not([hidden]) > .card";
    show(this.node, this.list.querySelector(shown) !== null);
    if (!this.list.querySelector(`${shown}[tabindex="0"]`)) this.enter(this.list.querySelector(shown));
  }

  /** One card of a group can be tabbed to; from there arrows lead to the others. */
  enter(card) {
    if (!card || card.tabIndex === 0) return;
    for (const other of this.list.querySelectorAll('.card[tabindex="0"]')) other.tabIndex = -1;
    card.tabIndex = 0;
  }

  onKey(event) {
    const cards = [...this.list.querySelectorAll("li:not([hidden]) > .card")];
    const at = cards.indexOf(document.activeElement);
    if (at < 0) return;
    const tops = cards.map((card) => card.parentElement.offsetTop);
    const columns = tops.filter((top) => top === tops[0]).length;
    const targets = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at + columns,
      ArrowUp: at - columns,
      Home: 0,
      End: cards.length - 1,
    };
    const target = cards[targets[event.key]];
    if (!target) return;
    event.preventDefault();
    target.focus();
  }
}

class Fleet {
  /** `onOpen(key)`: somebody wants to know more of that instance. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.views = new Map();
    this.groups = new Map();
    this.troubles = new Map();
    byId("find").addEventListener("input", () => this.filter());
  }

  /** `changed`: the keys whose cards are different; null: any may be. */
  update(state, changed) {
    const fleet = state.fleet;
    const keys = changed ?? new Set([...Object.keys(fleet), ...this.views.keys()]);
    const touched = new Set();
    const focused = document.activeElement;
    for (const key of keys) this.updateOne(key, fleet[key], touched);
    for (const role of touched) this.arrange(role, fleet);
    if (!focused.isConnected) this.focus("");
    this.judge(state);
    if (keys.size === 0) return;
    const cards = Object.values(fleet);
    for (const [role, group] of this.groups) group.summarize(cards.filter((card) => card.role === role));
    this.filter();
  }

  updateOne(key, card, touched) {
    let view = this.views.get(key);
    if (card === undefined) {
      if (view) {
        this.views.delete(key);
        touched.add(view.role);
        const neighbour = view.item.contains(document.activeElement) ? neighbourOf(view.item) : null;
        view.item.remove();
        neighbour?.firstChild.focus();
      }
      return;
    }
    if (!view) {
      view = new Card(() => this.onOpen(key));
      view.role = card.role;
      this.views.set(key, view);
      touched.add(card.role);
    }
    view.update(card);
  }

  arrange(role, fleet) {
    const entries = [...this.views].filter(([, view]) => view.role === role).map(([key, view]) => ({ view, card: fleet[key] }));
    let group = this.groups.get(role);
    if (!group) {
      group = new Group(role);
      this.groups.set(role, group);
      const order = Object.keys(ROLES);
      const nodes = [...this.groups].sort(([a], [b]) => order.indexOf(a) - order.indexOf(b)).map(([, one]) => one.node);
      byId("groups").replaceChildren(...nodes);
    }
    group.arrange(entries);
  }

  /** Where nothing has the focus: back to that instance's card, or into its group, or into any. */
  focus(key) {
    if (document.activeElement !== document.body) return;
    const [role] = key.split("/");
    const entranceOf = (place) => place?.querySelector('li:not([hidden]) > .card[tabindex="0"]');
    const card = this.views.get(key)?.button ?? entranceOf(this.groups.get(role)?.list) ?? entranceOf(byId("groups"));
    card?.focus();
  }

  judge({ proxy, fleet, flow }) {
    const cards = Object.values(fleet).filter((card) => card.word !== "leaving");
    const unwell = Object.entries(fleet).filter(([, card]) => card.word !== WELL);
    const [mood, text] = verdict(proxy, cards, flow);
    mark(byId("fleet-section"), "mood", mood);
    say(byId("verdict"), text);
    const well = cards.filter((card) => card.word === WELL).length;
    const title = `${well}/${cards.length} ready · pdproxy`;
    if (document.title !== title) document.title = title;
    this.listTroubles(unwell);
    show(byId("finder"), this.views.size >= DENSE_FROM || byId("find").value !== "");
  }

  /** Who stays in it stays the same button: somebody may be about to press it. */
  listTroubles(unwell) {
    unwell.sort(([, a], [, b]) => gravity(a) - gravity(b) || inOrder(a.name, b.name));
    const shown = new Map(unwell.slice(0, MAX_TROUBLES));
    for (const key of this.troubles.keys()) if (!shown.has(key)) this.troubles.delete(key);
    for (const [key, card] of shown) {
      if (!this.troubles.has(key)) this.troubles.set(key, new Trouble(() => this.onOpen(key)));
      this.troubles.get(key).update(card);
    }
    arrange(byId("troubles"), [...shown.keys()].map((key) => this.troubles.get(key).item));
    const num = unwell.length - shown.size;
    say(byId("troubles-more"), num > 0 ? `and ${numbers.format(num)} more` : "");
  }

  filter() {
    const wanted = byId("find").value.trim().toLowerCase();
    let num = 0;
    for (const view of this.views.values()) {
      const isWanted = `${view.name.textContent} ${view.word.textContent}`.toLowerCase().includes(wanted);
      show(view.item, isWanted);
      num += isWanted;
    }
    for (const group of this.groups.values()) group.keepEntrance();
    const found = num > 0 ? `${numbers.format(num)} of ${numbers.format(this.views.size)}` : "No instance has that in its name or state.";
    say(byId("found"), wanted === "" ? "" : found);
  }
}

/** Who needs attention, and why. */
class Trouble {
  constructor(onOpen) {
    this.name = element("b", "");
    this.word = element("span", "card-word");
    this.why = element("span", "quiet");
    this.button = element("button", "trouble", element("span", "mark"), this.name, " ", this.word, " ", this.why);
    this.button.type = "button";
    this.button.addEventListener("click", onOpen);
    this.item = element("li", "", this.button);
  }

  update(card) {
    mark(this.button, "word", card.word);
    say(this.name, card.name);
    say(this.word, card.word);
    say(this.why, card.why);
    show(this.why, card.why !== "");
  }
}

/** The nearest one beside it that can be seen. */
function neighbourOf(item) {
  for (const side of ["nextElementSibling", "previousElementSibling"]) {
    for (let other = item[side]; other; other = other[side]) if (!other.hidden) return other;
  }
  return null;
}

/** The worst first. */
function gravity(card) {
  const order = ["down", "breaker open", "breaker half open", "unknown", "alive", "draining", "leaving"];
  return order.indexOf(card.word);
}

/** [mood, words]: what there is to be said of the whole. */
function verdict(proxy, cards, flow) {
  const well = cards.filter((card) => card.word === WELL).length;
  if (proxy.draining) return ["warn", `Shutting down, with ${count(flow.in_flight, "request")} under way`];
  if (cards.length === 0) return ["bad", "There are no instances"];
  if (!proxy.ready) return ["bad", `Requests are refused: ${lacks(cards)}`];
  const [missing] = missingRoles(cards);
  if (missing) return ["warn", `${missing === "prefill" ? "Decoders" : "Prefillers"} answer alone: ${lacks(cards)}`];
  if (well === cards.length) return ["well", cards.length === 2 ? "Both instances are ready" : `All ${cards.length} instances are ready`];
  return ["warn", `${well} of ${cards.length} instances are ready`];
}

function missingRoles(cards) {
  return Object.keys(ROLES).filter((role) => !cards.some((card) => card.role === role && card.routable));
}

function lacks(cards) {
  const missing = missingRoles(cards);
  if (missing.length === 2) return "no prefiller and no decoder takes any";
  if (missing.length === 1) return missing[0] === "prefill" ? "no prefiller takes any" : "no decoder takes any";
  return "prefillers and decoders have no model in common";
}
