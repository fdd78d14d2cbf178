// Draws a Grafana dashboard (public/dashboard.json) of a Prometheus with Grafana's own components.
// Of the address: from, to (Unix seconds), step (seconds), rate ($__rate_interval, seconds), board (a file in public/).
import "@fontsource/inter/400.css";
import "@fontsource/inter/500.css";
import "uplot/dist/uPlot.min.css";
import {
  applyFieldOverrides, createTheme, dateTime, FieldType, getDisplayValueAlignmentFactors,
  getFieldDisplayValues, standardTransformers, standardTransformersRegistry, toDataFrame, transformDataFrame, VizOrientation,
} from "@grafana/data";
import { BarGauge, BigValue, PanelChrome, ThemeContext, TimeSeries, VizRepeater } from "@grafana/ui";
import React, { useEffect, useRef, useState } from "react";
import { createRoot } from "react-dom/client";
import { lastValueFrom } from "rxjs";

const address = new URLSearchParams(location.search);
const TO = Number(address.get("to") ?? Math.floor(Date.now() / 1000));
const FROM = Number(address.get("from") ?? TO - 300);
const STEP = Number(address.get("step") ?? 2);
const RATE = Number(address.get("rate") ?? 15);
const theme = createTheme({ colors: { mode: "dark" } });
const timeRange = { from: dateTime(FROM * 1000), to: dateTime(TO * 1000), raw: { from: "", to: "" } };
const MARGIN = 16, GAP = 8, ROW = 30;
const WIDTH = document.documentElement.clientWidth - 2 * MARGIN;

standardTransformersRegistry.setInit(() =>
  ["sortByTransformer", "convertFieldTypeTransformer", "reduceTransformer", "organizeFieldsTransformer"]
    .map((name) => standardTransformers[name])
    .map((transformation) => ({ id: transformation.id, name: transformation.name, transformation: async () => transformation })),
);

const fill = (text) =>
  text
    .replaceAll("$__rate_interval", `${RATE}s`)
    .replaceAll("$__interval", `${STEP}s`)
    .replaceAll("$__range", `${TO - FROM}s`)
    .replaceAll(/\$(model|engine)\b/g, ".*");

async function ask(target) {
  const query = fill(target.expr);
  const path = target.instant ? "query" : "query_range";
  const when = target.instant ? { time: TO } : { start: FROM, end: TO, step: STEP };
  const response = await fetch(`/api/v1/${path}?${new URLSearchParams({ query, ...when })}`);
  const body = await response.json();
  if (body.status !== "success") throw new Error(`${body.error}: ${query}`);
  return body.data.result;
}

function legend(format, labels, expr) {
  if (format) return format.replaceAll(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? "");
  const { __name__, ...rest } = labels;
  const inner = Object.entries(rest).map(([name, value]) => `${name}="${value}"`).join(", ");
  return inner ? `${__name__ ?? ""}{${inner}}` : (__name__ ?? expr);
}

// As Grafana's Prometheus data source makes frames: one of each series, or a table.
function framesOf(answer, target) {
  if (target.format !== "table") return answer.map((series) => frameOf(series, target));
  const names = [...new Set(answer.flatMap((series) => Object.keys(series.metric)))];
  const labels = names.map((name) => ({ name, type: FieldType.string, values: answer.map((series) => series.metric[name]) }));
  const values = answer.map((series) => Number(series.value[1]));
  const time = { name: "Time", type: FieldType.time, values: answer.map((series) => series.value[0] * 1000) };
  return [toDataFrame({ refId: target.refId, fields: [time, ...labels, { name: "Value", type: FieldType.number, values }] })];
}

function frameOf(series, target) {
  const points = series.values ?? [series.value];
  const name = legend(target.legendFormat, series.metric, fill(target.expr));
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: "Time", type: FieldType.time, values: points.map((p) => p[0] * 1000), config: { interval: STEP * 1000 } },
      {
        name: "Value", type: FieldType.number, labels: series.metric, config: { displayNameFromDS: name },
        values: points.map((p) => Number(p[1])),
      },
    ],
  });
}

// What Grafana adds to a panel that does not say otherwise.
const THRESHOLDS = { mode: "absolute", steps: [{ value: -Infinity, color: "green" }, { value: 80, color: "red" }] };
const CUSTOM = {
  drawStyle: "line", lineInterpolation: "linear", lineWidth: 1, fillOpacity: 0, gradientMode: "none", pointSize: 5,
  showPoints: "auto", spanNulls: false, barAlignment: 0, axisPlacement: "auto", axisLabel: "", axisColorMode: "text",
  axisBorderShow: false, axisCenteredZero: false, scaleDistribution: { type: "linear" },
  hideFrom: { legend: false, tooltip: false, viz: false }, thresholdsStyle: { mode: "off" },
};
function fieldConfigOf(panel) {
  const { defaults, overrides } = panel.fieldConfig;
  const series = panel.type === "timeseries";
  const thresholds = defaults.thresholds ?? THRESHOLDS;
  const steps = thresholds.steps.map((s) => ({ ...s, value: s.value ?? -Infinity }));
  return {
    defaults: {
      mappings: [], color: { mode: series ? "palette-classic" : "thresholds" }, ...defaults,
      thresholds: { ...thresholds, steps },
      custom: series ? { ...CUSTOM, ...defaults.custom, stacking: { group: "A", ...defaults.custom?.stacking } } : {},
    },
    overrides,
  };
}

// A registry of field settings, which Grafana's application fills with its editors.
const SETTINGS = ["unit", "min", "max", "decimals", "displayName", "noValue", "mappings", "thresholds", "color"];
const items = [
  ...SETTINGS.map((id) => ({ id, path: id })),
  ...[...Object.keys(CUSTOM), "stacking", "axisSoftMin", "axisSoftMax", "lineStyle", "fillBelowTo", "transform"].map((key) => ({
    id: `custom.${key}`, path: key, isCustom: true,
  })),
].map((item) => ({ ...item, settings: {}, shouldApply: () => true, process: (value) => value }));
const fieldConfigRegistry = { list: () => items, getIfExists: (id) => items.find((item) => item.id === id) };
const dress = (frames, panel) =>
  applyFieldOverrides({
    data: frames, fieldConfig: fieldConfigOf(panel), fieldConfigRegistry, replaceVariables: (text) => text, theme, timeZone: "utc",
  });

const Empty = ({ children }) => (
  <div style={{ height: "100%", display: "grid", placeItems: "center", color: theme.colors.text.secondary }}>{children}</div>
);

// The time series panel takes what is not finite for no point.
const finite = (field) => ({ ...field, values: field.values.map((v) => (Number.isFinite(v) ? v : null)) });

function Series({ panel, frames, width, height }) {
  const options = { calcs: [], ...panel.options.legend };
  return (
    <TimeSeries frames={dress(frames.map((f) => ({ ...f, fields: f.fields.map(finite) })), panel)} structureRev={1} width={width} height={height} timeRange={timeRange} timeZone="utc"
      legend={options} options={panel.options} />
  );
}

const displayValues = (panel, frames) =>
  getFieldDisplayValues({
    fieldConfig: fieldConfigOf(panel), reduceOptions: { values: false, fields: "", ...panel.options.reduceOptions },
    replaceVariables: (text) => text, theme, data: dress(frames, panel), timeZone: "utc",
    sparkline: panel.type === "stat" && (panel.options.graphMode ?? "area") !== "none",
  });

function Repeated({ panel, frames, width, height }) {
  const { options } = panel;
  const bars = panel.type === "bargauge";
  const gap = !bars ? 3 : options.displayMode === "lcd" ? 2 : 10;
  const draw = ({ value, width, height, count, alignmentFactors, orientation }) =>
    bars ? (
      <BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} theme={theme}
        width={width} height={height} orientation={orientation} itemSpacing={gap} lcdCellWidth={12} showUnfilled
        displayMode={options.displayMode ?? "gradient"} valueDisplayMode={options.valueMode ?? "color"} alignmentFactors={alignmentFactors}
        namePlacement={options.namePlacement ?? "auto"} text={options.text} />
    ) : (
      <BigValue value={value.display} count={count} theme={theme} width={width} height={height} alignmentFactors={alignmentFactors}
        sparkline={value.sparkline} colorMode={options.colorMode ?? "value"} graphMode={options.graphMode ?? "area"}
        justifyMode={options.justifyMode ?? "auto"} textMode={options.textMode ?? "auto"} />
    );
  return (
    <VizRepeater source={frames} renderCounter={0} width={width} height={height} itemSpacing={gap} minVizWidth={8} minVizHeight={options.minVizHeight ?? 16}
      maxVizHeight={300} orientation={options.orientation === "horizontal" ? VizOrientation.Horizontal : VizOrientation.Vertical}
      getValues={() => displayValues(panel, frames)} renderValue={draw} getAlignmentFactors={getDisplayValueAlignmentFactors} />
  );
}

// Not Grafana's: @grafana/ui has no heatmap. Buckets without those below them, as its Prometheus data source makes them.
function Heatmap({ panel, frames, width, height }) {
  const { color } = panel.options, opacity = color.mode === "opacity";
  const canvas = useRef(null);
  useEffect(() => {
    const rows = frames
      .map((f) => ({ le: f.fields[1].labels.le, at: new Map(f.fields[0].values.map((t, i) => [t / 1000, f.fields[1].values[i] ?? 0])) }))
      .sort((a, b) => parseFloat(a.le.replace("+Inf", "1e99")) - parseFloat(b.le.replace("+Inf", "1e99")));
    const c = canvas.current.getContext("2d");
    c.clearRect(0, 0, width, height);
    c.font = "12px Inter";
    const cells = rows.flatMap((row, y) => [...row.at].map(([t, v]) => [t, y, Math.max(0, v - (rows[y - 1]?.at.get(t) ?? 0))]));
    const most = Math.max(...cells.map((cell) => cell[2]));
    const left = 40, h = (height - 24) / rows.length, w = (width - left) / ((TO - FROM) / STEP);
    const x = (t) => left + ((t - FROM) / (TO - FROM)) * (width - left);
    for (const [t, y, v] of cells) {
      if (v <= 1e-9) continue;
      const share = v / most;
      c.fillStyle = opacity ? `rgba(87,148,242,${share ** color.exponent})` : `rgb(${8 + 239 * share},${48 + 203 * share},${107 + 148 * share})`;
      c.fillRect(x(t), height - 24 - (y + 1) * h, Math.max(1, w - 0.5), h - 1);
    }
    c.fillStyle = theme.colors.text.primary;
    rows.forEach((row, y) => c.fillText(row.le, 4, height - 24 - y * h - h / 2 + 4));
    for (let t = Math.ceil(FROM / 60) * 60; t < TO - 15; t += 60) c.fillText(new Date(t * 1000).toISOString().slice(11, 16), x(t) - 16, height - 4);
  });
  return <canvas ref={canvas} width={width} height={height} />;
}

function Panel({ panel, unit }) {
  const [state, setState] = useState(null);
  useEffect(() => {
    Promise.all(panel.targets.map(async (target) => framesOf(await ask(target), target)))
      .then(async (answers) => {
        const frames = await lastValueFrom(transformDataFrame(panel.transformations ?? [], answers.flat()));
        setState({ frames, parts: answers.map((a) => a.length) });
      })
      .catch((error) => setState({ frames: [], error: String(error) }));
  }, []);
  useEffect(() => {
    if (!state) return;
    const values = state.frames.flatMap((f) => [...f.fields.at(-1).values]).filter(Number.isFinite);
    const log = { title: panel.title, error: state.error, parts: state.parts, points: values.length, max: values.length ? Math.max(...values) : null };
    console.log("PANEL " + JSON.stringify({ ...log, names: state.frames.map((f) => f.fields.at(-1).config.displayNameFromDS) }));
  }, [state]);
  const { x, y, w, h } = panel.gridPos;
  const place = { position: "absolute", left: MARGIN + x * unit, top: MARGIN + y * (ROW + GAP) };
  const width = w * unit - GAP, height = h * (ROW + GAP) - GAP;
  const Drawing = { timeseries: Series, heatmap: Heatmap }[panel.type] ?? Repeated;
  return (
    <div style={place}>
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
        {(innerWidth, innerHeight) =>
          !state ? <Empty>…</Empty>
          : state.frames.length === 0 ? <Empty>{state.error ?? panel.fieldConfig.defaults.noValue ?? "No data"}</Empty>
          : <Drawing panel={panel} frames={state.frames} width={innerWidth} height={innerHeight} />}
      </PanelChrome>
    </div>
  );
}

function Dashboard() {
  const [board, setBoard] = useState(null);
  useEffect(() => void fetch(`/${address.get("board") ?? "dashboard.json"}`).then((r) => r.json()).then(setBoard), []);
  if (!board) return null;
  const unit = (WIDTH + GAP) / 24;
  const bottom = Math.max(...board.panels.map((p) => p.gridPos.y + p.gridPos.h));
  const title = { position: "absolute", left: MARGIN, fontSize: 16, fontWeight: 500, lineHeight: "30px" };
  return (
    <div style={{ position: "relative", height: 2 * MARGIN + bottom * (ROW + GAP) }}>
      {board.panels.map((panel) =>
        panel.type === "row" ? <div key={panel.id} style={{ ...title, top: MARGIN + panel.gridPos.y * (ROW + GAP) }}>⌄ {panel.title}</div>
        : <Panel key={panel.id} panel={panel} unit={unit} />)}
    </div>
  );
}

const css = `*{box-sizing:border-box} body,h1,h2,h6,p,ul,ol{margin:0} ol,ul{padding:0;list-style:none}
body{background:${theme.colors.background.canvas};color:${theme.colors.text.primary};font:14px/1.57 ${theme.typography.fontFamily}}
button{background:none;border:0;padding:0;color:inherit;font:inherit} h2{font-size:14px;font-weight:500}`;
// Grafana's components measure text: not before its font is there.
await Promise.all(["400 14px Inter", "500 14px Inter"].map((font) => document.fonts.load(font)));
createRoot(document.getElementById("root")).render(
  <ThemeContext.Provider value={theme}><style>{css}</style><Dashboard /></ThemeContext.Provider>,
);
