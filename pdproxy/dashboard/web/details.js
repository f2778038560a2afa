// One instance, large, and what can be done with it. The admin key is in this page's memory and nowhere else.

const ACTS = {
  drain: {
    name: "Drain",
    warns: (card) => `${card.name} gets no new requests; ${underWay(card)} under way may finish.`,
    method: "POST",
    path: (name) => `${name}/drain`,
    done: (name) => `${name} is draining.`,
  },
  resume: {
    name: "Resume",
    warns: ({ name }) => `${name} gets new requests again.`,
    method: "POST",
    path: (name) => `${name}/resume`,
    done: (name) => `${name} is in use again.`,
  },
  remove: {
    name: "Remove",
    warns: ({ name }) => `${name} is no part of the fleet any more. Its process goes on. One that has work under way is refused.`,
    method: "DELETE",
    path: (name) => name,
    done: (name) => `${name} was removed.`,
  },
  force: {
    name: "Remove anyway",
    warns: ({ name }) => `${name} is no part of the fleet any more. Requests that wait for it are tried elsewhere; answers under way may finish.`,
    method: "DELETE",
    path: (name) => `${name}?force=true`,
    done: (name) => `${name} was removed, and leaves when its answers have ended.`,
  },
};

const PATIENCE_MS = 15000;
const TOLD_FOR_MS = 15000;

class Details {
  /** `onClose(key)`: that instance was looked at. */
  constructor(onClose) {
    this.dialog = byId("details");
    this.state = null;
    this.key = null; // of the instance shown
    this.adminKey = "";
    this.act = null; // to be confirmed
    this.question = 0; // counts what was asked: an answer to an earlier one comes too late
    this.shown = ""; // what the actions were made for
    this.timer = 0; // until what was done has been told for long enough
    byId("details-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => {
      this.choose(null);
      onClose(this.key);
    });
    byId("forget").addEventListener("click", () => this.keep(""));
  }

  open(key) {
    this.key = key;
    this.choose(null);
    if (!this.dialog.open) this.dialog.showModal();
  }

  update(state) {
    this.state = state;
    if (this.dialog.open) this.render();
  }

  choose(act, error = "") {
    const before = this.act;
    this.act = act;
    this.error = error;
    this.question += 1;
    this.shown = "";
    this.render();
    if (act === null && before !== null && this.dialog.open) this.offerOf(before).focus();
  }

  /** Where that act was chosen. */
  offerOf(act) {
    return byId("actions").querySelector(`[data-act="${act === "force" ? "remove" : act}"]:enabled`) ?? byId("details-close");
  }

  render() {
    const card = this.state?.fleet[this.key];
    if (card === undefined) {
      if (this.dialog.open) this.dialog.close();
      return;
    }
    say(byId("details-name"), card.name);
    mark(byId("details-word"), "word", card.word);
    say(byId("details-word").lastChild, card.word);
    say(byId("details-why"), card.why);
    show(byId("details-why"), card.why !== "");
    fillPairs(byId("details-facts"), factsOf(card));
    const offered = this.act === null && card.draining; // else a form stays as it is while the instance changes
    const shown = JSON.stringify([this.question, card.word === "leaving", this.state.proxy.can_change, offered]);
    if (this.shown !== shown) { // else somebody may be typing
      this.shown = shown;
      byId("actions").replaceChildren(...this.actions(card));
    }
    if (this.act !== null) { // what is under way changes while somebody reads and types
      const warning = document.getElementById("warning");
      if (warning) say(warning, ACTS[this.act].warns(card));
    }
  }

  actions(card) {
    if (card.word === "leaving") return [];
    if (!this.state.proxy.can_change) {
      return [element("p", "quiet", "To drain or remove instances from here, start the proxy with --admin-key-file.")];
    }
    return this.act === null ? this.offers(card) : [this.form(card)];
  }

  offers(card) {
    const buttons = [card.draining ? "resume" : "drain", "remove"].map((act) => {
      const button = element("button", act === "remove" ? "danger" : "", `${ACTS[act].name} …`);
      button.type = "button";
      button.dataset.act = act;
      button.addEventListener("click", () => this.choose(act));
      return button;
    });
    return [element("p", "buttons", ...buttons)];
  }

  form(card) {
    const act = ACTS[this.act];
    const confirm = element("button", this.act === "drain" || this.act === "resume" ? "" : "danger", `${act.name} ${card.name}`);
    const cancel = element("button", "plain", "Cancel");
    const input = element("input", "");
    const warning = element("p", "", act.warns(card));
    const form = element("form", "question", warning);
    warning.id = "warning";
    for (const control of [input, confirm, cancel]) control.setAttribute("aria-describedby", warning.id);
    cancel.type = "button";
    cancel.addEventListener("click", () => this.choose(null));
    if (this.error) {
      const error = element("p", "error", this.error);
      error.setAttribute("role", "alert");
      form.append(error);
    }
    if (this.adminKey === "") {
      Object.assign(input, { type: "password", required: true, autocomplete: "off", id: "admin-key" });
      const label = element("label", "", "Admin key");
      label.htmlFor = "admin-key";
      form.append(label, input, element("p", "quiet", "Kept in this page until it is closed or loaded again."));
    }
    form.append(element("p", "buttons", confirm, cancel));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      confirm.disabled = true;
      this.perform(card.name, this.adminKey || input.value);
    });
    queueMicrotask(() => (this.adminKey === "" ? input : cancel).focus());
    return form;
  }

  async perform(name, key) {
    const { act, question } = this;
    const { method, path, done } = ACTS[act];
    const { status, error } = await ask(method, path(encodeURIComponent(name)), key);
    if (status !== 0) this.keep(status === 401 ? "" : key);
    const isLate = this.question !== question;
    if (error === "" || isLate) this.tell(error === "" ? done(name) : `${name}: ${error}`);
    if (isLate) return;
    if (error === "") this.dialog.close();
    else this.choose(status === 409 && act === "remove" ? "force" : act, error);
  }

  tell(text) {
    clearTimeout(this.timer);
    say(byId("done"), text);
    this.timer = setTimeout(() => say(byId("done"), ""), TOLD_FOR_MS);
  }

  keep(key) {
    this.adminKey = key;
    show(byId("forget"), key !== "");
  }
}

/** {status, error} of the proxy's answer: 0 where there was none, "" where it has done it. */
async function ask(method, path, key) {
  const options = { method, headers: { authorization: `Bearer ${key}` }, cache: "no-store" };
  try {
    const answer = await fetch(`admin/instances/${path}`, { ...options, signal: AbortSignal.timeout(PATIENCE_MS) });
    const told = await answer.json().catch(() => ({}));
    return { status: answer.status, error: answer.ok ? "" : (told.error?.message ?? `The proxy answered ${answer.status}.`) };
  } catch (error) {
    const isLost = error instanceof TypeError;
    return { status: 0, error: isLost ? "The proxy cannot be reached, or that is no key." : "The proxy did not answer in time." };
  }
}

function factsOf(card) {
  const pairs = [
    ["Role", card.role],
    ["Address", card.url],
    ["Engine", card.engine],
    ["Models", card.models.join(", ") || "not told"],
    ["Epoch", card.epoch ?? "not told"],
    ["State", card.state],
    ["Gets new requests", card.routable ? "yes" : "no"],
    ["Breaker", card.breaker.replace("_", " ")],
    ["Share of the load", card.routable ? `${Math.round(card.weight * 100)} %` : "none"],
    ["Requests under way", numbers.format(card.requests)],
    ["Calls to it under way", numbers.format(card.legs)],
    ["Tokens to read", numbers.format(card.queued_tokens)],
  ];
  if (card.cache_tokens !== undefined) {
    pairs.push(["Tokens in its KV cache", `${numbers.format(card.resident_tokens)} of ${numbers.format(card.cache_tokens)}`]);
  }
  if (card.capacity !== undefined) {
    pairs.push(["Pages held", `${numbers.format(card.held)} of ${numbers.format(card.capacity)}`]);
    if (card.occupied !== undefined) pairs.push(["Pages in use there", numbers.format(card.occupied)]);
    if (card.foreign > 0) pairs.push(["Foreign pages", `${numbers.format(card.foreign)}, which no lease explains`]);
    if (card.orphaned > 0) pairs.push(["Orphaned pages", `${numbers.format(card.orphaned)}, until ${card.awaits.join("; ")}`]);
    pairs.push(["Waiting for pages", `${count(card.queue, "request")}, ${count(card.queued_pages, "page")}`]);
  }
  return pairs;
}
