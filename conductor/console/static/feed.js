// Asks for a path again and again, as long as somebody looks: not while the tab is hidden, less often while the
// server is away.

import { Away, Refused, get } from "./api.js";

const RETRY_MS = [1000, 2000, 4000, 8000];

export class Feed {
  constructor(path, everyMs, take, watch) {
    this.path = path;
    this.everyMs = everyMs;
    this.take = take;
    this.watch = watch;
    this.failures = 0;
    this.stopped = false;
    this.timer = null;
    this.asking = null;
    this.onVisible = () => { if (!document.hidden) this.now(); };
    document.addEventListener("visibilitychange", this.onVisible);
    this.now();
  }

  now() {
    clearTimeout(this.timer);
    if (!this.stopped && !this.asking) this.ask();
  }

  turn(path) {
    this.path = path;
    this.again();
  }

  // Not what is on its way, but anew: as after another key, that the answer to the former is not about.
  again() {
    this.asking?.abort();
    this.asking = null;
    this.now();
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    this.asking?.abort();
    document.removeEventListener("visibilitychange", this.onVisible);
  }

  async ask() {
    const asking = new AbortController();
    this.asking = asking;
    let waitMs = this.everyMs;
    try {
      const answer = await get(this.path, { signal: asking.signal });
      if (asking.signal.aborted) return;
      this.failures = 0;
      this.watch.live();
      this.take(answer);
    } catch (error) {
      if (asking.signal.aborted) return;
      if (error instanceof Refused) {
        this.watch.refused(error.message);
        waitMs = null;
      } else {
        waitMs = RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)];
        this.failures += 1;
        if (error instanceof Away) this.watch.away();
        else this.watch.failed(error);
      }
    }
    this.asking = null;
    if (waitMs !== null && !this.stopped && !document.hidden) this.timer = setTimeout(() => this.now(), waitMs);
  }
}
