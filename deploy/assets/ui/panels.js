// Figures of an answer, and tables of sources and tenants.

import { draftedShare } from "./answer.js";
import { TARGET, element, meet, sources, styleOf, swatch } from "./sources.js";

const VERIFIED = "draftline:spec_decode_num_draft_tokens_total";
const ACCEPTED = "draftline:spec_decode_num_accepted_tokens_total";
const GENERATED = "vllm:generation_tokens_total";

const number = (value, digits = 0) =>
  value === null || !Number.isFinite(value) ? "\u2013" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const percent = (part, whole) => (whole ? `${number((100 * part) / whole)} %` : "\u2013");

/** Show an answer's figures in a list. */
export function drawFigures(place, answer) {
  const figures = [
    ["tau", number(answer.tau, 2)],
    ["tokens/s", number(answer.tokensPerS, 1)],
    ["first token", answer.firstTokenS === null ? "\u2013" : `${number(1000 * answer.firstTokenS)} ms`],
    ["tokens", number(answer.numTokens)],
    ["steps", number(answer.numSteps)],
    ["drafted", percent(draftedShare(answer), 1)],
  ];
  place.replaceChildren(
    ...figures.map(([name, value]) => {
      const box = element("div");
      box.append(element("dt", { text: name }), element("dd", { text: value }));
      return box;
    }),
  );
}

function total(found, name, source) {
  return found
    .filter((sample) => sample.name === name && (source === undefined || sample.labels.source === source))
    .reduce((sum, sample) => sum + sample.value, 0);
}

function bar(source, share) {
  const outer = element("span", { className: `bar ${styleOf(source)}`, "aria-hidden": "true" });
  const inner = element("i");
  inner.style.setProperty("--share", `${100 * share}%`);
  outer.append(inner);
  return outer;
}

/** The table of sources: of this answer, and of all that the server has answered. */
export function drawSources(place, answer, found) {
  meet(found.filter((sample) => sample.name === VERIFIED).map((sample) => sample.labels.source));
  const tokens = answer?.bySource() ?? new Map();
  const nodes = answer?.nodesBySource() ?? {};
  const generated = total(found, GENERATED);
  const drafted = total(found, ACCEPTED);
  const rows = sources().map((source) => {
    const isTarget = source === TARGET;
    const row = element("tr");
    const name = element("th", { scope: "row" });
    name.append(swatch(source), source);
    const count = tokens.get(source) ?? 0;
    const share = element("td");
    share.append(
      bar(source, answer?.numTokens ? count / answer.numTokens : 0),
      element("span", { text: `${number(count)} (${percent(count, answer?.numTokens)})`, className: "share" }),
    );
    const own = nodes[source] ?? { verified: 0, accepted: 0 };
    const verified = total(found, VERIFIED, source);
    const accepted = total(found, ACCEPTED, source);
    const texts = [
      isTarget ? "" : number(own.verified),
      isTarget ? "" : percent(own.accepted, own.verified),
      percent(isTarget ? generated - drafted : accepted, generated),
      isTarget ? "" : number(verified),
      isTarget ? "" : percent(accepted, verified),
    ];
    row.append(name, share, ...texts.map((text) => element("td", { text })));
    return row;
  });
  place.replaceChildren(...rows);
}

/** The table of tenants: every counter and gauge that has a tenant; hidden where there are none. */
export function drawTenants(card, head, body, found) {
  const own = found.filter((sample) => sample.labels.tenant !== undefined && !/_(sum|count|created)$/.test(sample.name));
  card.hidden = !own.length;
  if (!own.length) return;
  const names = [...new Set(own.map((sample) => sample.name))];
  const tenants = [...new Set(own.map((sample) => sample.labels.tenant))].sort();
  const heading = element("tr");
  heading.append(
    element("th", { text: "tenant", scope: "col" }),
    ...names.map((name) => element("th", { text: name.replace(/^[a-z]+:(tenant_)?|_total$/g, "").replaceAll("_", " "), scope: "col" })),
  );
  head.replaceChildren(heading);
  body.replaceChildren(
    ...tenants.map((tenant) => {
      const row = element("tr");
      const cells = names.map((name) => {
        const values = own.filter((sample) => sample.name === name && sample.labels.tenant === tenant);
        return element("td", { text: values.length ? number(values.reduce((sum, one) => sum + one.value, 0)) : "\u2013" });
      });
      row.append(element("th", { text: tenant, scope: "row" }), ...cells);
      return row;
    }),
  );
}

/** One line of what the engines do now. */
export function loadLine(found) {
  const running = total(found, "vllm:num_requests_running");
  const waiting = total(found, "vllm:num_requests_waiting");
  const usage = found.filter((sample) => sample.name === "vllm:kv_cache_usage_perc");
  const most = Math.max(0, ...usage.map((sample) => sample.value));
  return `${number(running)} running, ${number(waiting)} waiting, KV ${percent(most, 1)} full`;
}
