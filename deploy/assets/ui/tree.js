// The token tree of one step, drawn from left to right.

import { TARGET, styleOf, titleOf } from "./sources.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 28;
const HEIGHT = 20;
const GAP = 28;
const CHAR = 7.3;
const MAX_CHARS = 14;
const EDGE = 10;

/** White space of a token is shown by signs. */
export function visible(text) {
  const shown = text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
  const chars = [...(shown || "\u2205")];
  return chars.length > MAX_CHARS ? `${chars.slice(0, MAX_CHARS - 1).join("")}\u2026` : chars.join("");
}

function make(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** Nodes of the tree, the root first and the target's own token last, without places yet. */
function nodesOf(step) {
  const { tree } = step;
  const path = new Set(tree.path);
  const nodes = [{ text: tree.root, source: TARGET, parent: null, isTaken: true, note: "last token of the text" }];
  tree.texts.forEach((text, place) => {
    const source = tree.sources[place];
    const note = `${source}, value ${tree.values[place]}${path.has(place) ? ", accepted" : ""}`;
    nodes.push({ text, source, parent: tree.parents[place] + 1, isTaken: path.has(place), note });
  });
  // The target's tokens of this step: one, unless a stage decoded several.
  let above = (tree.path.at(-1) ?? -1) + 1;
  for (let place = tree.path.length; place < step.texts.length; place += 1) {
    const source = step.sources[place];
    nodes.push({ text: step.texts[place], source, parent: above, isTaken: true, note: titleOf(source) });
    above = nodes.length - 1;
  }
  return nodes;
}

/** Columns by depth, rows by leaves; the path stands on top. */
function place(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => node.parent === null || children[node.parent].push(index));
  for (const own of children) own.sort((a, b) => Number(nodes[b].isTaken) - Number(nodes[a].isTaken));
  const widths = [];
  nodes.forEach((node) => {
    node.depth = node.parent === null ? 0 : nodes[node.parent].depth + 1;
    node.label = visible(node.text);
    node.width = Math.max(2, node.label.length) * CHAR + 10;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  });
  const lefts = [EDGE];
  widths.forEach((width, depth) => (lefts[depth + 1] = lefts[depth] + width + GAP));
  let rows = 0;
  const walk = (index) => {
    const node = nodes[index];
    node.x = lefts[node.depth];
    node.row = rows;
    children[index].forEach((child, order) => {
      if (order > 0) rows += 1;
      walk(child);
    });
  };
  walk(0);
  return { width: lefts.at(-1) - GAP + EDGE, height: (rows + 1) * ROW + 2 * EDGE };
}

/** An SVG of a step's tree. */
export function drawTree(step, title) {
  const nodes = nodesOf(step);
  const { width, height } = place(nodes);
  const y = (node) => EDGE + node.row * ROW + ROW / 2;
  const edges = [];
  const boxes = [];
  for (const node of nodes) {
    if (node.parent !== null) {
      const from = nodes[node.parent];
      const [x1, y1, x2, y2] = [from.x + from.width, y(from), node.x, y(node)];
      const middle = x2 - GAP / 2;
      const path = `M${x1} ${y1}H${middle - 6}C${middle + 4} ${y1} ${middle - 4} ${y2} ${x2} ${y2}`;
      edges.push(make("path", { d: path, class: node.isTaken ? "edge taken" : "edge" }));
    }
    const box = { x: node.x, y: y(node) - HEIGHT / 2, width: node.width, height: HEIGHT, rx: 4 };
    boxes.push(
      make(
        "g",
        { class: `node ${styleOf(node.source)}${node.isTaken ? " taken" : ""}` },
        make("title", {}, `${JSON.stringify(node.text)}: ${node.note}`),
        make("rect", box),
        make("text", { x: node.x + 5, y: y(node) + 4 }, node.label),
      ),
    );
  }
  const taken = edges.filter((edge) => edge.getAttribute("class") !== "edge");
  const others = edges.filter((edge) => edge.getAttribute("class") === "edge");
  const size = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title };
  return make("svg", size, ...others, ...taken, ...boxes);
}

/** A sentence that says what the picture shows. */
export function captionOf(step, number) {
  const committed = step.texts.map(visible).join(" ");
  const { tree } = step;
  if (!tree) return `Step ${number}: the prompt, and its first token ${committed}`;
  const counts = new Map();
  for (const source of tree.sources) counts.set(source, (counts.get(source) ?? 0) + 1);
  const by = [...counts].map(([source, count]) => `${count} of ${source}`).join(", ");
  const left = tree.num_left_out ? `, ${tree.num_left_out} more not shown` : "";
  const size = tree.sources.length;
  const nodes = size ? `${size} node${size > 1 ? "s" : ""} (${by})${left}` : "no drafts";
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const times = `drafting ${ms(tree.draft_s)}, verifying ${ms(tree.verify_s)}`;
  return `Step ${number}: ${nodes}, ${tree.path.length} accepted; ${times}. Committed: ${committed}`;
}
