// What goes through: how many requests and tokens, how fast, what failed, and where the time goes.

const STEPS = Object.keys(PHASES).filter((name) => name !== "retry");
const MAX_REASONS = 3;

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
    const isWhole = flow.collecting_s === 0;
    const lack = isWhole ? "" : `${count(flow.collecting_s, "second")} more`;
    const rate = (each) => (each > 0 && each < 10 ? each.toFixed(1) : numbers.format(Math.round(each)));
    figure(byId("rate"), isWhole ? rate(flow.per_s) : "", { unit: "a second" });
    figure(byId("tokens"), isWhole ? rate(flow.tokens_per_s) : "", { unit: "a second" });
    drawHistory(byId("history"), byId("history-says"), "Requests that ended", [flow.all, flow.failed], lack);
    drawHistory(byId("tokens-history"), byId("tokens-says"), "Tokens of answers", [flow.tokens], lack);
    this.wait(flow.first_token_s);
    this.fail(flow, lack);
    say(byId("outcomes-since"), isWhole ? "minute" : count(flow.window_s, "second"));
    const ended = Object.entries(OUTCOMES).filter(([name]) => name !== "shutdown" || flow.ended[name] > 0);
    const pairs = ended.map(([name, word]) => [word, numbers.format(flow.ended[name] ?? 0)]);
    pairs.unshift(["under way now", numbers.format(flow.in_flight)]);
    if (flow.unsettled > 0) pairs.push(["pages being settled", numbers.format(flow.unsettled)]);
    fillPairs(byId("outcomes"), pairs);
    say(byId("phases-says"), isWhole ? "" : `: collecting, ${lack}`);
    this.split(flow.now, isWhole ? flow.phase_s : {});
  }

  /** Percentiles of few are not told: they would be those of single requests. */
  wait({ num, least, p50, p95 }) {
    const isKnown = p50 !== undefined;
    figure(byId("ttft"), isKnown ? duration(p50) : "", { name: "p50" });
    figure(byId("ttft-high"), isKnown ? duration(p95) : " ", { name: "p95" });
    const lack = `${count(least - num, "more stream")} within a minute`;
    say(byId("ttft-says"), isKnown ? `of ${count(num, "stream")} in the last minute` : lack);
  }

  /** What has failed is told at once; that nothing has, when it has been looked at for long enough. */
  fail({ ended, failures, window_s: windowS }, lack) {
    const num = ended.failed ?? 0;
    const whole = Object.values(ended).reduce((sum, each) => sum + each, 0);
    figure(byId("failed"), num > 0 || lack === "" ? numbers.format(num) : "");
    mark(byId("failed"), "any", String(num > 0));
    const since = lack === "" ? "the last minute" : `${count(windowS, "second")}; collecting, ${lack}`;
    say(byId("failed-says"), num > 0 || lack === "" ? `of ${count(whole, "request")} in ${since}` : lack);
    const reasons = Object.entries(failures).sort(([one, a], [other, b]) => b - a || inOrder(one, other));
    const shown = reasons.slice(0, reasons.length > MAX_REASONS ? MAX_REASONS - 1 : MAX_REASONS);
    const rest = reasons.slice(shown.length).reduce((sum, [, each]) => sum + each, 0);
    if (rest > 0) shown.push(["others", rest]);
    fillPairs(byId("failures"), shown.map(([reason, each]) => [reason, numbers.format(each)]));
  }

  /** Each phase's share is of all of them together: the mean request. */
  split(now, means) {
    const whole = STEPS.reduce((sum, name) => sum + (means[name] ?? 0), 0);
    for (const [name, row] of this.rows) {
      const mean = means[name];
      say(row.now, now[name] ? numbers.format(now[name]) : "");
      say(row.mean, mean === undefined ? "" : duration(mean));
      row.fill.style.setProperty("--share", whole > 0 ? ((mean ?? 0) / whole).toFixed(4) : "0");
    }
  }
}

/** A figure between its name and its unit, or that it is not known yet (""). */
function figure(node, text, { name = "", unit = "" } = {}) {
  mark(node, "collecting", String(text === ""));
  mark(node, "name", text.trim() === "" ? "" : name);
  mark(node, "unit", text.trim() === "" ? "" : unit);
  say(node, text === "" ? "collecting" : text);
}

/** A second that nobody looked at is null: it is drawn as a gap, and not as one in which nothing happened. */
function drawHistory(picture, caption, title, [all, failed = []], lack) {
  const most = Math.max(1, ...all);
  const [gaps, wholes, failures] = picture.children;
  const unseen = [...Array(60 - all.length).fill(null), ...all].map((each) => (each === null ? most : 0));
  gaps.setAttribute("d", steps(unseen, most));
  wholes.setAttribute("d", steps(all, most));
  failures?.setAttribute("d", steps(failed, most));
  const num = failed.reduce((sum, each) => sum + each, 0);
  const numUnseen = unseen.filter((each) => each > 0).length;
  const peak = Math.round(Math.max(0, ...all));
  const parts = [lack || (peak > 0 ? `at most ${numbers.format(peak)} in one second` : "none in any second")];
  if (num > 0) parts.push(`failed: ${Math.round(num)}`);
  if (numUnseen > 0 && lack === "") parts.push(`not observed: ${count(numUnseen, "second")}, in grey`);
  const text = parts.join("; ");
  say(caption, text);
  picture.setAttribute("aria-label", `${title} in each second. ${text}`);
}

/** A step per second, the last one at the right edge of sixty. */
function steps(values, most) {
  const left = 60 - values.length;
  const tops = values.map((value, place) => `H${left + place}V${(20 - (20 * value) / most).toFixed(2)}H${left + place + 1}`);
  return values.some((value) => value > 0) ? `M${left} 20${tops.join("")}V20Z` : "";
}
