// One instance, small: its name, how it is in a word, its pages as a bar, who waits for them.

class Card {
  constructor(onOpen) {
    this.mark = element("span", "mark");
    this.name = element("span", "card-name");
    this.word = element("span", "card-word");
    this.fill = element("span", "fill");
    this.bar = element("span", "bar", this.fill);
    this.amount = element("span", "");
    this.noun = element("span", "card-noun");
    this.queue = element("span", "card-queue");
    this.more = element("span", "card-more");
    for (const node of [this.mark, this.bar]) node.setAttribute("aria-hidden", "true");
    const load = element("span", "card-load", this.amount, this.noun);
    const figures = element("span", "card-figures", load, this.queue);
    const head = element("span", "card-head", this.name, this.word);
    this.button = element("button", "card", this.mark, head, this.bar, figures, this.more);
    this.button.type = "button";
    this.button.setAttribute("aria-haspopup", "dialog");
    this.button.tabIndex = -1;
    this.button.addEventListener("click", onOpen);
    this.item = element("li", "", this.button);
  }

  /** Shows `card`, touching only what is different. */
  update(card) {
    mark(this.button, "word", card.word);
    mark(this.button, "breaker", card.breaker);
    say(this.name, card.name);
    say(this.word, card.word);
    const [amount, noun] = loadOf(card);
    say(this.amount, amount);
    say(this.noun, noun);
    say(this.queue, card.queue === undefined ? "" : `${numbers.format(card.queue)} waiting`);
    mark(this.queue, "any", String(card.queue > 0));
    say(this.more, moreOf(card));
    const [used, whole] = memoryOf(card);
    show(this.bar, whole > 0);
    const share = whole > 0 ? Math.min(1, used / whole) : 0;
    if (this.share !== share) {
      this.share = share;
      this.fill.style.setProperty("--share", share.toFixed(4));
    }
    const title = card.why || card.url;
    if (this.button.title !== title) this.button.title = title;
  }
}

/** How many requests are bound to it now: the number that is told wherever it is told how busy an instance is. */
function underWay(card) {
  return count(card.requests, "request");
}

/** [used, of how much, of what]: the pages that slots guard; where there are none, the KV cache in which it writes. */
function memoryOf(card) {
  if (card.capacity > 0) return [card.held, card.capacity, " pages"];
  if (card.cache_tokens > 0) return [card.resident_tokens, card.cache_tokens, " tokens"];
  return [0, 0, ""];
}

/** [amount, of what]; where there is little room, the amount alone is shown. */
function loadOf(card) {
  const [used, whole, noun] = memoryOf(card);
  if (whole > 0) return [`${numbers.format(used)} of ${numbers.format(whole)}`, noun];
  return card.role === "prefill" ? [count(card.queued_tokens, "token"), " to read"] : [underWay(card), ""];
}

function moreOf(card) {
  const parts = [underWay(card)];
  if (!card.word.startsWith("breaker")) parts.push(`breaker ${card.breaker.replace("_", " ")}`);
  if (card.weight < 1) parts.push(`${Math.round(card.weight * 100)} % share`);
  if (card.epoch) parts.push(`epoch ${shortEpoch(card)}`);
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}

/** What tells two of its processes apart, without what all of them begin with. */
function shortEpoch(card) {
  const own = card.epoch.startsWith(`${card.name}-`) ? card.epoch.slice(card.name.length + 1) : card.epoch;
  return own.length > 8 ? own.slice(0, 8) : own;
}
