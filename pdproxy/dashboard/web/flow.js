// What goes through: how many requests end, and where their time goes.

const STEPS = Object.keys(PHASES).filter((name) => name !== "retry");

class Flow {
  constructor() {
    this.rows = new Map();
    for (const name of STEPS) this.rows.set(name, this.addRow(PHASES[name]));
  }

  addRow(title) {
    const now = element("td", "number");
    const mean = element("td", "number");
    const fill = element("span", "fill");
    const bar = element("span", "bar", fill);
    bar.setAttribute("aria-hidden", "true");
    const name = element("th", "", title);
    name.scope = "row";
    byId("phases").tBodies[0].append(element("tr", "", name, now, mean, element("td", "wide", bar)));
    return { now, mean, fill };
  }

  update({ flow }) {
    say(byId("rate"), flow.per_s < 10 ? flow.per_s.toFixed(1) : Math.round(flow.per_s).toString());
    say(byId("window"), flow.window_s >= 60 ? "minute" : count(flow.window_s, "second"));
    this.draw(flow);
    const ended = Object.entries(OUTCOMES).filter(([name]) => name === "done" || flow.ended[name] > 0);
    const pairs = ended.map(([name, word]) => [word, numbers.format(flow.ended[name] ?? 0)]);
    pairs.unshift(["under way", numbers.format(flow.in_flight)]);
    if (flow.unsettled > 0) pairs.push(["pages being settled", numbers.format(flow.unsettled)]);
    fillPairs(byId("outcomes"), pairs);
    this.split(flow);
  }

  /** Each phase's share is of all of them together: the mean request. */
  split({ now, phase_s: means }) {
    const whole = STEPS.reduce((sum, name) => sum + (means[name] ?? 0), 0);
    for (const [name, row] of this.rows) {
      const mean = means[name];
      say(row.now, now[name] ? numbers.format(now[name]) : "");
      say(row.mean, mean === undefined ? "" : duration(mean));
      row.fill.style.setProperty("--share", whole > 0 ? ((mean ?? 0) / whole).toFixed(4) : "0");
    }
  }

  /** A second that nobody looked at is null: it is drawn as a gap, and not as one in which nothing happened. */
  draw({ all, failed }) {
    const most = Math.max(1, ...all);
    const [gaps, wholes, failures] = byId("history").children;
    const unseen = [...Array(60 - all.length).fill(null), ...all].map((each) => (each === null ? most : 0));
    gaps.setAttribute("d", steps(unseen, most));
    wholes.setAttribute("d", steps(all, most));
    failures.setAttribute("d", steps(failed, most));
    const num = failed.reduce((sum, each) => sum + each, 0);
    const numUnseen = unseen.filter((each) => each > 0).length;
    const parts = numUnseen < 60 ? [`At most ${numbers.format(Math.round(Math.max(0, ...all)))} in one second`] : [];
    if (num > 0) parts.push(`failed: ${Math.round(num)}`);
    if (numUnseen > 0) parts.push(`not observed: ${count(numUnseen, "second")}, in grey`);
    const text = parts.join("; ");
    say(byId("history-says"), text);
    byId("history").setAttribute("aria-label", `Requests that ended in each second. ${text}`);
  }
}

/** A step per second, the last one at the right edge of sixty. */
function steps(values, most) {
  const left = 60 - values.length;
  const tops = values.map((value, place) => `H${left + place}V${(20 - (20 * value) / most).toFixed(2)}H${left + place + 1}`);
  return values.some((value) => value > 0) ? `M${left} 20${tops.join("")}V20Z` : "";
}
