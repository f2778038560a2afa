// The connection: a snapshot, then changes, merged into one state. It comes back by itself, and says when it is away.

const SILENT_AFTER_MS = 8000; // the proxy says something every three seconds
const AGAIN_MS = 1000;

/** RFC 7396: null takes away, objects go into each other, all else replaces. */
function merge(into, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete into[name];
    else if (isTable(value) && isTable(into[name])) merge(into[name], value);
    else into[name] = value;
  }
}

function isTable(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

class Link {
  /** `onChange(patch)`: `state` has changed by that; null: it is another altogether. */
  constructor(onChange) {
    this.state = null;
    this.onChange = onChange;
    this.source = null;
    this.timer = 0;
    this.heardAt = 0; // performance.now()
    this.heardTime = null; // by the clock on the wall
    this.offset = 0; // from performance.now() / 1000 to the proxy's seconds
    document.addEventListener("visibilitychange", () => this.follow());
    setInterval(() => this.watch(), AGAIN_MS);
    this.follow();
  }

  /** The proxy's clock, by the last that was heard of it. */
  now() {
    return performance.now() / 1000 + this.offset;
  }

  get isLive() {
    return document.documentElement.dataset.link === "live";
  }

  /** Nobody looks at a page that is hidden, so it asks for nothing. */
  follow() {
    if (document.hidden) {
      this.close();
      this.become("rest");
    } else if (this.source === null) {
      this.open();
    }
  }

  open() {
    this.close();
    if (document.documentElement.dataset.link === "rest") this.become("wait");
    this.heardAt = performance.now();
    const source = (this.source = new EventSource("ui/events"));
    for (const kind of ["snapshot", "change", "beat"]) {
      source.addEventListener(kind, (event) => this.hear(kind, JSON.parse(event.data)));
    }
    source.addEventListener("again", () => this.open()); // it ends, so that nobody keeps one whom nobody reads
    source.addEventListener("error", () => {
      this.become("lost");
      if (source.readyState === EventSource.CLOSED) this.openLater();
    });
  }

  openLater() {
    this.close();
    this.timer = setTimeout(() => this.follow(), AGAIN_MS);
  }

  close() {
    clearTimeout(this.timer);
    if (this.source !== null) this.source.close();
    this.source = null;
  }

  hear(kind, told) {
    const { now, ...content } = told;
    this.heardAt = performance.now();
    this.heardTime = new Date();
    this.offset = now - this.heardAt / 1000;
    this.become("live");
    if (kind === "snapshot") {
      this.state = content;
      this.onChange(null);
    } else if (kind === "change" && this.state !== null) {
      merge(this.state, content);
      this.onChange(content);
    }
  }

  /** A line can be dead without saying so. */
  watch() {
    if (this.source === null || performance.now() - this.heardAt < SILENT_AFTER_MS) return;
    this.become("lost");
    this.open();
  }

  become(word) {
    const root = document.documentElement;
    if (root.dataset.link === word) return;
    root.dataset.link = word;
    const since = this.heardTime === null ? "" : ` What you see is from ${clockTime.format(this.heardTime)}.`;
    const says = {
      live: "Live",
      wait: "Connecting",
      rest: "At rest while hidden",
      lost: `Not connected, trying again.${since}`,
    };
    say(byId("link-says"), says[word]);
  }
}
