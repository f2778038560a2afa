// The requests that have been under way for longest, and what they are at.

class Slow {
  constructor() {
    this.rows = [];
    this.shown = [];
  }

  update({ slow }) {
    this.shown = slow;
    while (this.rows.length < slow.length) this.rows.push(this.addRow());
    slow.forEach((request, place) => this.fill(this.rows[place], request));
    this.rows.forEach((row, place) => show(row.node, place < slow.length));
    show(byId("slow"), slow.length > 0);
    show(byId("slow-none"), slow.length === 0);
  }

  addRow() {
    const row = {
      total: element("td", "number"),
      step: element("span", ""),
      since: element("span", "quiet number"),
      from: element("span", "leg"),
      to: element("span", "leg"),
      model: element("span", "model"),
      id: element("span", ""),
      tokens: element("span", ""),
      pages: element("span", "quiet"),
      attempts: element("td", "number wide"),
    };
    const phase = element("td", "two", row.step, row.since);
    const way = element("td", "two", element("span", "", row.from, row.to), element("span", "quiet id", row.model, row.id));
    const prompt = element("td", "number two", row.tokens, row.pages);
    row.node = element("tr", "", row.total, phase, way, prompt, row.attempts);
    byId("slow").tBodies[0].append(row.node);
    return row;
  }

  fill(row, request) {
    say(row.step, PHASES[request.step] ?? request.step);
    const { prefiller: from, decoder: to } = request;
    say(row.from, from && to ? `${from} → ` : (from ?? to ?? "not chosen yet"));
    say(row.to, from && to ? to : "");
    say(row.model, request.model ?? "");
    say(row.id, request.id);
    say(row.tokens, request.tokens === undefined ? "" : count(request.tokens, "token"));
    say(row.pages, request.pages === undefined ? "" : count(request.pages, "page"));
    say(row.attempts, String(request.attempts));
  }

  /** Times go on by themselves; nothing is sent for that. */
  tick(now) {
    this.shown.forEach((request, place) => {
      say(this.rows[place].total, age(now - request.started));
      say(this.rows[place].since, `for ${age(now - request.since)}`);
    });
  }
}
