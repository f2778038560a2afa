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
    entries.forEach(({ view }, place) => {
      if (this.list.children[place] !== view.item) this.list.insertBefore(view.item, this.list.children[place] ?? null);
    });
    mark(this.node, "dense", String(entries.length >= DENSE_FROM));
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

  /** There always is a card to begin with, as long as any is shown. */
  keepEntrance() {
    const shown = "li:not([hidden]) > .card";
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
    byId("find").addEventListener("input", () => this.filter());
  }

  /** `changed`: the keys whose cards are different; null: any may be. */
  update(state, changed) {
    const fleet = state.fleet;
    const keys = changed ?? new Set([...Object.keys(fleet), ...this.views.keys()]);
    const touched = new Set();
    for (const key of keys) this.updateOne(key, fleet[key], touched);
    for (const role of touched) this.arrange(role, fleet);
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
        view.item.remove();
        this.views.delete(key);
        touched.add(view.role);
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
    show(group.node, entries.length > 0);
    group.arrange(entries);
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
    show(byId("finder"), this.views.size >= DENSE_FROM);
  }

  /** Left alone where it says the same as before: somebody may be about to press one. */
  listTroubles(unwell) {
    const list = byId("troubles");
    unwell.sort(([, a], [, b]) => gravity(a) - gravity(b) || inOrder(a.name, b.name));
    const shown = unwell.slice(0, MAX_TROUBLES);
    const told = JSON.stringify([shown.map(([key, card]) => [key, card.word, card.why]), unwell.length]);
    if (list.told === told) return;
    list.told = told;
    const items = shown.map(([key, card]) => element("li", "", this.trouble(key, card)));
    if (unwell.length > shown.length) items.push(element("li", "quiet", `and ${unwell.length - shown.length} more`));
    list.replaceChildren(...items);
  }

  trouble(key, card) {
    const word = element("span", "card-word", card.word);
    const button = element("button", "trouble", element("span", "mark"), element("b", "", card.name), " ", word);
    if (card.why) button.append(" ", element("span", "quiet", card.why));
    button.type = "button";
    button.dataset.word = card.word;
    button.addEventListener("click", () => this.onOpen(key));
    return button;
  }

  filter() {
    const wanted = byId("find").value.trim().toLowerCase();
    for (const view of this.views.values()) {
      const text = `${view.name.textContent} ${view.word.textContent}`.toLowerCase();
      show(view.item, wanted === "" || text.includes(wanted));
    }
    for (const group of this.groups.values()) group.keepEntrance();
  }
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
  if (well === cards.length) return ["well", cards.length === 2 ? "Both instances are ready" : `All ${cards.length} instances are ready`];
  return ["warn", `${well} of ${cards.length} instances are ready`];
}

function lacks(cards) {
  const missing = Object.keys(ROLES).filter((role) => !cards.some((card) => card.role === role && card.routable));
  if (missing.length === 2) return "no prefiller and no decoder takes any";
  if (missing.length === 1) return missing[0] === "prefill" ? "no prefiller takes any" : "no decoder takes any";
  return "prefillers and decoders have no model in common";
}
