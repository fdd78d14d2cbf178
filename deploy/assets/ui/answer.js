// One answer: its stream, its tokens on the page, and what is counted of it.

import { stream } from "./server.js";
import { TARGET, element, meet, styleOf, titleOf } from "./sources.js";

// Steps whose trees are kept for looking back.
const MAX_STEPS = 5000;

/** An answer as it grows. Times are milliseconds of the page's clock. */
export class Answer {
  constructor(pane, legend) {
    this.pane = pane;
    this.legend = legend;
    this.tokenIds = [];
    this.sources = [];
    // What each step committed: {texts, sources, spans, tree}.
    this.steps = [];
    this.metrics = null;
    this.finishReason = null;
    this.startedAt = this.firstAt = this.lastAt = 0;
    this.numFirst = 0;
    pane.replaceChildren();
  }

  /** Stream the answer of a body; `onStep` is called after each event with tokens. */
  async run(kind, body, signal, onStep) {
    this.startedAt = performance.now();
    if (kind === "completion") {
      this.pane.append(element("span", { text: body.prompt, className: "prompt" }));
      this.pane.scrollTop = this.pane.scrollHeight;
    }
    for await (const event of stream(kind, body, signal)) {
      if (event.metrics) this.metrics = event.metrics.speculative_decoding;
      this.finishReason = event.choices?.[0]?.finish_reason ?? this.finishReason;
      if (!event.draftline?.token_ids.length) continue;
      this.add(event.draftline);
      onStep();
    }
  }

  add({ token_ids: ids, sources, texts, trees }) {
    this.lastAt = performance.now();
    if (!this.tokenIds.length) {
      this.firstAt = this.lastAt;
      this.numFirst = ids.length;
    }
    meet(sources);
    const number = this.steps.length;
    const spans = texts.map((text, place) => this.span(text, sources[place], number));
    this.tokenIds.push(...ids);
    this.sources.push(...sources);
    if (number < MAX_STEPS) this.steps.push({ texts, sources, spans, tree: trees?.at(-1) ?? null });
    const isAtEnd = this.pane.scrollHeight - this.pane.scrollTop - this.pane.clientHeight < 40;
    this.pane.append(...spans);
    if (isAtEnd) this.pane.scrollTop = this.pane.scrollHeight;
  }

  span(text, source, number) {
    const span = element("span", {
      text,
      className: `token ${styleOf(source)}`,
      title: `${titleOf(source)}, step ${number}`,
    });
    span.dataset.source = source;
    span.dataset.step = String(number);
    this.legend.mark(span);
    return span;
  }

  get numTokens() {
    return this.tokenIds.length;
  }

  /** Seconds from the request to the first token. */
  get firstTokenS() {
    return this.numTokens ? (this.firstAt - this.startedAt) / 1000 : null;
  }

  /** Tokens a second behind the first event; null before there are any. */
  get tokensPerS() {
    const behind = this.numTokens - this.numFirst;
    return behind > 0 ? (1000 * behind) / Math.max(this.lastAt - this.firstAt, 1) : null;
  }

  /** Steps that committed tokens behind the prompt's: the server's word, once it is said. */
  get numSteps() {
    return this.metrics?.num_spec_steps ?? Math.max(this.steps.length - 1, 0);
  }

  /** Tokens a step, the target's own included. */
  get tau() {
    if (this.metrics) return this.metrics.mean_acceptance_length;
    return this.numSteps ? (this.numTokens - this.numFirst) / this.numSteps : null;
  }

  /** How many tokens came from each source. */
  bySource() {
    const counts = new Map();
    for (const source of this.sources) counts.set(source, (counts.get(source) ?? 0) + 1);
    return counts;
  }

  /** Verified and accepted nodes of each drafter: from the trees, then the server's own count. */
  nodesBySource() {
    const counts = {};
    if (this.metrics) {
      for (const [source, own] of Object.entries(this.metrics.by_source)) {
        counts[source] = { verified: own.num_draft_tokens, accepted: own.num_accepted_tokens };
      }
      return counts;
    }
    const of = (source) => (counts[source] ??= { verified: 0, accepted: 0 });
    for (const { tree } of this.steps) {
      for (const source of tree?.sources ?? []) of(source).verified += 1;
      for (const node of tree?.path ?? []) of(tree.sources[node]).accepted += 1;
    }
    return counts;
  }
}

/** Whether two answers have the same tokens: null, or the number of the first that differs. */
export function firstDifference(one, other) {
  const length = Math.max(one.numTokens, other.numTokens);
  for (let place = 0; place < length; place += 1) {
    if (one.tokenIds[place] !== other.tokenIds[place]) return place;
  }
  return null;
}

/** Share of an answer's tokens that drafters proposed, 0 to 1. */
export function draftedShare(answer) {
  if (!answer.numTokens) return 0;
  return 1 - (answer.bySource().get(TARGET) ?? 0) / answer.numTokens;
}
