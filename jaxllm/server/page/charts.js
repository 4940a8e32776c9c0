// The charts of the last five minutes, and predicted against measured costs.

import { byId, clock, compact, count, fillRows, known, make, milliseconds } from "./pieces.js";
import { percent, plural, setText, showTip } from "./pieces.js";

const WINDOW_SECONDS = 300;
const BIN_SECONDS = 5; // of bars

// A series: its name in the answer's history, its name here, its colour, and of which tier it is a share.
const CHARTS = [
  {
    title: "Throughput",
    format: (value) => `${compact(value)} tokens/s`,
    tick: compact,
    series: [["output_tokens", "output", "blue"], ["prompt_tokens", "prompts", "teal"]],
  },
  {
    title: "Requests",
    format: count,
    tick: compact,
    series: [["running", "running", "green"], ["waiting", "waiting", "amber"], ["swapped", "swapped", "violet"]],
  },
  {
    title: "Blocks in use",
    format: percent,
    tick: percent,
    top: 1,
    series: [
      ["device_blocks", "device, held", "blue", "device"],
      ["host_blocks", "host, with cache", "violet", "host"],
    ],
  },
  {
    title: "Latency",
    note: "median and 99th percentile of each second",
    format: milliseconds,
    tick: milliseconds,
    isLog: true,
    series: [
      ["ttft_ms", "first token", "blue"],
      ["ttft_p99_ms", "first token p99", "violet"],
      ["e2e_ms", "end to end", "teal"],
      ["e2e_p99_ms", "end to end p99", "amber"],
    ],
  },
  {
    title: "Preemptions and restores",
    note: `in ${BIN_SECONDS} s, and in all`,
    format: count,
    tick: compact,
    isBars: true,
    series: [
      ["dropped", "dropped", "amber"],
      ["swapped_out", "swapped out", "violet"],
      ["swapped_in", "swapped in", "teal"],
    ],
  },
  {
    title: "Requests ended",
    note: `in ${BIN_SECONDS} s, and in all`,
    format: count,
    tick: compact,
    isBars: true,
    series: [["finished", "finished", "green"], ["refused", "refused", "red"]],
  },
];

function makeChart(spec) {
  const figure = make(byId("charts"), "figure");
  make(make(figure, "h3", "", `${spec.title} `), "small", "", spec.note ?? "");
  const legend = make(figure, "ul", "legend");
  const figures = spec.series.map(([, name, colourName]) => {
    const item = make(legend, "li");
    make(item, "i", `${colourName}-key`).ariaHidden = "true";
    item.append(name);
    return make(item, "b");
  });
  const canvas = make(figure, "canvas");
  canvas.role = "img";
  const chart = { spec, canvas, figures, pointer: null, now: 0, times: [], values: spec.series.map(() => []) };
  const point = (event, pointer) => {
    chart.pointer = pointer;
    showTip(event, drawChart(chart));
  };
  canvas.addEventListener("pointermove", (event) => point(event, event.offsetX));
  canvas.addEventListener("pointerleave", (event) => point(event, null));
  return chart;
}

const charts = CHARTS.map(makeChart);

export function showCharts(live) {
  const rows = charts.flatMap((chart) => {
    take(chart, live);
    drawChart(chart);
    return chart.spec.series.map((series, i) => rowOf(chart, i));
  });
  fillRows(byId("series"), rows, 6, "");
}

function take(chart, { now, history, pool }) {
  const { spec } = chart;
  chart.now = now;
  chart.times = history.time;
  chart.values = spec.series.map(([key, , , tier]) => {
    const whole = tier ? Math.max(1, pool[tier].total) : 1;
    return history[key].map((value) => (value === null ? null : value / whole));
  });
  const said = spec.series.map(([, name], i) => {
    const values = there(chart.values[i]);
    const text = known(spec.isBars ? sum(values) : values.at(-1), spec.format);
    setText(chart.figures[i], text);
    return `${name} ${text}`;
  });
  chart.canvas.ariaLabel = `${spec.title}, the last five minutes: ${said.join(", ")}`;
  if (spec.isBars) putInBins(chart);
}

const there = (values) => values.filter((value) => value !== null);
const sum = (values) => values.reduce((total, value) => total + value, 0);

// Bins begin at multiples of their length, so that bars move and do not change.
function putInBins(chart) {
  const binOf = (time) => Math.floor(time / BIN_SECONDS);
  const first = binOf(chart.now - WINDOW_SECONDS);
  const bins = [...Array(binOf(chart.now) - first + 1).keys()];
  const { times, values } = chart;
  chart.times = times.length ? bins.map((bin) => (first + bin + 0.5) * BIN_SECONDS) : [];
  chart.values = values.map((series) => {
    const sums = chart.times.map(() => 0);
    series.forEach((value, i) => (sums[binOf(times[i]) - first] += value));
    return sums;
  });
}

function rowOf({ spec, values }, i) {
  const shown = there(values[i]);
  const figures = shown.length ? [shown.at(-1), sum(shown) / shown.length, Math.min(...shown), Math.max(...shown)] : [];
  const texts = [0, 1, 2, 3].map((j) => known(figures[j], spec.format));
  const title = spec.note ? `${spec.title}, ${spec.note.split(",")[0]}` : spec.title;
  return [{ text: title, className: "" }, { text: spec.series[i][1], className: "" }, ...texts];
}

// Drawing

const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(`--${name}`).trim();

function prepare(canvas) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [w, h] = [width, height].map((length) => Math.round(length * devicePixelRatio));
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.lineJoin = "round";
  return { context, width, height };
}

function drawLine(context, points, name, width = 1, dash = []) {
  context.strokeStyle = colour(name);
  context.lineWidth = width;
  context.setLineDash(dash);
  context.beginPath();
  points.forEach(([x, y]) => context.lineTo(x, y));
  context.stroke();
  context.setLineDash([]);
}

function drawText(context, text, x, y, align = "left") {
  context.fillStyle = colour("muted");
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillText(text, x, y);
}

function drawDot(context, x, y, name, radius) {
  context.fillStyle = colour(name);
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

// Four times a whole number that is short to write, and not below the value.
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value / 4, 1)));
  const steps = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((step) => step * power);
  return 4 * steps.find((step) => Number.isInteger(step) && 4 * step >= value);
}

function decades(values) {
  const positive = values.filter((value) => value > 0);
  if (!positive.length) return [0, 3];
  const low = Math.floor(Math.log10(Math.min(...positive)));
  return [low, Math.max(low + 1, Math.ceil(Math.log10(Math.max(...positive))))];
}

function scaleOf(spec, values) {
  if (spec.isLog) {
    const [low, high] = decades(values.flat());
    const ticks = [...Array(high - low + 1).keys()].map((i) => 10 ** (low + i));
    return { ticks, place: (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) };
  }
  const heights = spec.isBars ? values[0].map((_, i) => sum(values.map((series) => series[i]))) : values.flat();
  const top = spec.top ?? niceTop(Math.max(0, ...heights));
  return { ticks: [0, 1, 2, 3, 4].map((i) => (top * i) / 4), place: (value) => Math.min(1, value / top) };
}

// Returns what is to be read where the pointer is.
function drawChart({ spec, canvas, values, times, now, pointer }) {
  const { context, width, height } = prepare(canvas);
  const scale = scaleOf(spec, values);
  const left = 8 + Math.max(...scale.ticks.map((tick) => context.measureText(spec.tick(tick)).width));
  const [right, top, bottom] = [width - 2, 7, height - 20];
  const x = (time) => right - ((now - time) / WINDOW_SECONDS) * (right - left);
  const y = (value) => bottom - scale.place(value) * (bottom - top);
  for (const tick of scale.ticks) {
    drawLine(context, [[left, y(tick)], [right, y(tick)]], "line");
    drawText(context, spec.tick(tick), left - 6, y(tick), "right");
  }
  for (let minute = 0; minute <= 5; minute++) {
    const align = minute === 5 ? "left" : minute ? "center" : "right";
    drawText(context, minute ? `−${minute} min` : "now", x(now - 60 * minute), height - 7, align);
  }
  if (!times.length) drawText(context, "nothing yet", (left + right) / 2, (top + bottom) / 2, "center");
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, height);
  context.clip();
  (spec.isBars ? drawBars : drawSeries)(context, spec, values, times.map(x), y);
  const text = pointer === null || !times.length ? "" : drawPointer();
  context.restore();
  return text;

  function drawPointer() {
    const distance = (time) => Math.abs(x(time) - pointer);
    const nearest = times.reduce((best, time, i) => (distance(time) < distance(times[best]) ? i : best), 0);
    drawLine(context, [[x(times[nearest]), top], [x(times[nearest]), bottom]], "muted");
    const said = spec.series.map(([, name], i) => `${name}: ${known(values[i][nearest], spec.format)}`);
    return [clock(times[nearest]), ...said].join("\n");
  }
}

function drawSeries(context, spec, values, xs, y) {
  spec.series.forEach(([, , name], i) => {
    const points = xs.flatMap((x, j) => (values[i][j] === null ? [] : [[x, y(values[i][j])]]));
    if (!points.length) return;
    if (i === 0 && !spec.isLog) {
      context.globalAlpha = 0.12;
      context.fillStyle = colour(name);
      context.beginPath();
      const outline = [[points[0][0], y(0)], ...points, [points.at(-1)[0], y(0)]];
      outline.forEach(([px, py]) => context.lineTo(px, py));
      context.fill();
      context.globalAlpha = 1;
    }
    drawLine(context, points, name, 1.5);
    if (points.length === 1) drawDot(context, ...points[0], name, 2.5);
  });
}

function drawBars(context, spec, values, xs, y) {
  const width = Math.max(1, Math.floor(xs[1] - xs[0]) - 1);
  const heights = xs.map(() => 0);
  spec.series.forEach(([, , name], i) => {
    context.fillStyle = colour(name);
    xs.forEach((x, j) => {
      const below = y(heights[j]);
      heights[j] += values[i][j];
      context.fillRect(Math.round(x - width / 2), y(heights[j]), width, below - y(heights[j]));
    });
  });
}

// Predicted against measured

let compared = [];

export function showScatter(decisions) {
  const predicted = (one) => (one.action === "swap" ? one.swap_ms : one.recompute_ms);
  compared = decisions
    .map((one) => ({
      predicted: predicted(one),
      measured: one.measured_ms,
      name: one.action === "swap" ? "violet" : "amber",
    }))
    .filter((one) => one.predicted > 0 && one.measured > 0);
  const number = plural(compared.length, "preemption");
  byId("scatter").ariaLabel = `Predicted against measured costs of ${number}; the table of decisions has them`;
  drawScatter();
}

function drawScatter() {
  const { context, width, height } = prepare(byId("scatter"));
  const [low, high] = decades(compared.flatMap((one) => [one.predicted, one.measured]));
  const [left, right, top, bottom] = [54, width - 8, 8, height - 22];
  const place = (value) => (Math.log10(value) - low) / (high - low);
  const x = (value) => left + place(value) * (right - left);
  const y = (value) => bottom - place(value) * (bottom - top);
  for (let power = low; power <= high; power++) {
    const value = 10 ** power;
    drawLine(context, [[left, y(value)], [right, y(value)]], "line");
    drawLine(context, [[x(value), top], [x(value), bottom]], "line");
    drawText(context, milliseconds(value), left - 6, y(value), "right");
    drawText(context, milliseconds(value), x(value), bottom + 13, power === high ? "right" : "center");
  }
  drawText(context, "↑ measured", left + 8, top + 12);
  drawText(context, "predicted →", right - 8, bottom - 12, "right");
  drawLine(context, [[left, bottom], [right, top]], "others", 1.5, [5, 4]);
  context.globalAlpha = 0.8;
  for (const one of compared) drawDot(context, x(one.predicted), y(one.measured), one.name, 4);
  context.globalAlpha = 1;
  if (compared.length) return;
  drawText(context, "nothing measured yet", (left + right) / 2, (top + bottom) / 2 + 18, "center");
}

export function redraw() {
  charts.forEach(drawChart);
  drawScatter();
}
