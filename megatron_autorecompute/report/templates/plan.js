"use strict";
// Draws what report/html.py packed: bytes and times come from the planner's replay, nothing is
// modelled here. Three parts: the data, two pictures that share one time axis, and what one points at.

const GIB = 2 ** 30, MIB = 2 ** 20;
const GUTTER = 104, AXIS = 20, MARK = 8; // pixels left of the pictures, below them, above a lane
const PS = 1e9; // picoseconds of a millisecond
const OUTSIDE = ["embedding", "final norm", "head"];
const WAY = 12; // pixels of a row of copies, one each way
const PARTS = [ // from the bottom of the stack to its top
  ["static", "static (weights, gradients, optimizer)"], ["overhead", "between stages, CUDA graphs"],
  ["outside", "embedding, head"], ["in-flight", "in flight (microbatches that wait)"],
  ["running", "running chunk"], ["transient", "transient"],
  ["copies", "to leave for host memory, back early, or kept from leaving"],
];
const $ = id => document.getElementById(id);

let data, stages, end;            // as computed; `end` is that of the time axis
let view;                         // [from, to] in ms
let focus = 0;                    // the stage that is drawn large
let cursor = null;                // {stage, event} that keys move
let colours = {};
let recorded = null;              // a step as torch recorded it: {stage, at, bytes}

// ---------------------------------------------------------------- data

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function summed(differences) {
  let sum = 0;
  return Float64Array.from(differences, difference => sum += difference);
}

// Columns over the events of one stage, and what follows from them for drawing.
function stageOf(raw, number) {
  const count = raw.ms.length;
  const stage = {
    number, count, moment: raw.moment, copies: copiesOf(raw.copies), ahead: raw.ahead_ms,
    budget: raw.budget_bytes, static: raw.static_bytes, optimizer: raw.optimizer_step_peak_bytes,
    binding: raw.binding && [raw.binding.event, raw.binding.unit],
    chunks: raw.units.map((units, c) => ({units: units.map((unit, u) => unitOf(unit, raw.recompute_ps[c][u]))})),
    backward: Uint8Array.from(summed(raw.backward)), chunk: Uint16Array.from(summed(raw.chunk)),
    microbatch: summed(raw.microbatch), start: new Float64Array(count), end: new Float64Array(count),
    inFlight: summed(raw.in_flight_bytes), outside: summed(raw.outside_bytes), overhead: summed(raw.overhead_bytes),
    peak: new Float64Array(count), peakUnit: new Uint16Array(count), after: new Float64Array(count),
  };
  stage.chunks.forEach(prepareChunk);
  let time = 0;
  for (let e = 0; e < count; e++) {
    const chunk = stage.chunks[stage.chunk[e]];
    stage.start[e] = time + raw.gap_ms[e];
    time = stage.end[e] = stage.start[e] + raw.ms[e];
    chunk.units.forEach((unit, u) => {
      const total = unit.reachLayers + unit.reachOutside + unit.transient[stage.backward[e]] + copiedAt(stage, e, u);
      if (u === 0 || total > stage.peak[e]) [stage.peak[e], stage.peakUnit[e]] = [total, u];
    });
    stage.peak[e] += stage.static + stage.inFlight[e] + stage.outside[e] + stage.overhead[e];
    stage.after[e] = total(partsAfter(stage, e));
  }
  stage.fullest = stage.binding ? partsAt(stage, ...stage.binding) : optimizerParts(stage);
  return stage;
}

function unitOf(raw, recompute) {
  const early = raw.ahead ? raw.ahead.time_ps : 0;
  return {
    name: raw.name, choice: raw.layers.length ? data.layers[raw.layers[0]] : "",
    outside: OUTSIDE.includes(raw.name), held: raw.held_bytes,
    transient: [raw.forward_transient_bytes, raw.backward_transient_bytes],
    ms: [raw.forward_ps / PS, (raw.backward_ps - early) / PS], recompute: recompute / PS,
  };
}

// Copies in the order in which each direction makes them.
function copiesOf(raw) {
  const copied = raw ? raw.copied.map(([out, from, to, ...about]) => [out, from / PS, to / PS, ...about]) : [];
  return raw && {
    ...raw, ways: [true, false].map(way => copied.filter(copy => copy[0] === way).map(copy => copy.slice(1))),
    waits: raw.waits.map(waits => waits.map(([at, wait]) => [at / PS, wait / PS])),
  };
}

function prepareChunk(chunk) {
  chunk.layers = chunk.outside = 0;
  for (const unit of chunk.units) {
    chunk[unit.outside ? "outside" : "layers"] += unit.held;
    [unit.reachLayers, unit.reachOutside] = [chunk.layers, chunk.outside];
  }
  // Each unit's share of the event; a backward passes the units from last to first.
  for (const side of [0, 1]) {
    const own = chunk.units.reduce((sum, unit) => sum + unit.ms[side], 0), whole = own || 1;
    (chunk.own ??= [])[side] = own;
    const order = side ? [...chunk.units].reverse() : chunk.units;
    let at = 0;
    for (const unit of order) {
      unit.span ??= [];
      unit.span[side] = [at, at += unit.ms[side] / whole];
    }
    chunk.recompute = side ? chunk.units.reduce((s, unit) => s + unit.recompute, 0) / whole : 0;
  }
}

// How long an event waits for copies before it has computed so much.
function waitedBefore(stage, event, computed) {
  let sum = 0;
  for (const [at, wait] of stage.copies ? stage.copies.waits[event] : []) if (at < computed - 1e-7) sum += wait;
  return sum;
}

const copiedAt = (stage, event, u) => stage.copies ? stage.copies.bytes[event][u] : 0;

function partsAt(stage, event, u) {
  const unit = stage.chunks[stage.chunk[event]].units[u];
  return [stage.static, stage.overhead[event], stage.outside[event] + unit.reachOutside,
    stage.inFlight[event], unit.reachLayers, unit.transient[stage.backward[event]], copiedAt(stage, event, u)];
}

// While the stage waits after an event (-1: before the first).
function partsAfter(stage, event) {
  if (event < 0) return [stage.static, stage.overhead[0], 0, 0, 0, 0, 0];
  const chunk = stage.chunks[stage.chunk[event]], kept = stage.backward[event] ? 0 : 1;
  return [stage.static, stage.overhead[event], stage.outside[event] + kept * chunk.outside,
    stage.inFlight[event] + kept * chunk.layers, 0, 0, stage.copies ? stage.copies.after[event] : 0];
}

const optimizerParts = stage => [stage.static, 0, 0, 0, 0, stage.optimizer, 0];
const total = parts => parts.reduce((sum, part) => sum + part, 0);

function spanOf(stage, event, u) {
  const chunk = stage.chunks[stage.chunk[event]], back = stage.backward[event];
  const start = stage.start[event], length = stage.copies ? chunk.own[back] : stage.end[event] - start;
  return chunk.units[u].span[back].map(share => start + share * length + waitedBefore(stage, event, share * length));
}

// When an event waits for copies.
function waitsOf(stage, event) {
  let waited = 0;
  return !stage.copies ? [] : stage.copies.waits[event].map(([at, wait]) => {
    const from = stage.start[event] + at + waited;
    waited += wait;
    return [from, from + wait];
  });
}

// The last event that has begun at a time; -1 before the first.
function lastBegun(stage, time) {
  let low = 0, high = stage.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (stage.start[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// What goes on at a time: the event and its unit, `unit` undefined while the stage waits.
function momentAt(stage, time) {
  if (time > data.step) return {event: stage.count, parts: optimizerParts(stage), optimizer: true};
  const event = lastBegun(stage, time);
  if (event < 0 || time >= stage.end[event]) return {event, parts: partsAfter(stage, event)};
  const units = stage.chunks[stage.chunk[event]].units;
  let unit = units.findIndex((_, u) => {
    const [from, to] = spanOf(stage, event, u);
    return from <= time && time < to;
  });
  if (unit < 0) unit = stage.peakUnit[event];
  return {event, unit, parts: partsAt(stage, event, unit)};
}

// The recorded step, if there is one: bytes from each point in time to the next.
function recordedOf(raw) {
  return raw && {stage: raw.stage, at: summed(raw.at_ms), bytes: summed(raw.level_bytes)};
}

// Which of its points holds at a time; -1 before the first and after the last.
function recordedAt(time) {
  let low = 0, high = recorded.at.length;
  if (time > recorded.at[high - 1]) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (recorded.at[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const isRecorded = stage => recorded !== null && recorded.stage === stage.number;
const recordedMost = stage => isRecorded(stage) ? recorded.bytes.reduce((a, b) => Math.max(a, b), 0) : 0;

// ---------------------------------------------------------------- words

function size(bytes, digits = 2) {
  return Math.abs(bytes) >= GIB ? `${(bytes / GIB).toFixed(digits)} GiB`
    : `${(bytes / MIB).toFixed(Math.max(digits - 1, 0))} MiB`;
}
function duration(ms) {
  const [value, unit] = Math.abs(ms) >= 1000 ? [ms / 1000, "s"] : [ms, "ms"];
  return `${value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2)} ${unit}`;
}
const escaped = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);

function eventName(stage, event) {
  const chunk = stage.chunks.length > 1 ? `, chunk ${stage.chunk[event]}` : "";
  return `stage ${stage.number}${chunk}, microbatch ${stage.microbatch[event]}`;
}

function eventTip(stage, event) {
  const chunk = stage.chunks[stage.chunk[event]], back = stage.backward[event];
  const ms = stage.end[event] - stage.start[event], waited = waitedBefore(stage, event, Infinity);
  const again = back ? chunk.recompute * (ms - waited) : 0;
  const units = chunk.units.map(unit => `<tr><td>${escaped(unit.name)}</td><td>${escaped(unit.choice)}</td>` +
    `<td>${duration(unit.ms[back])}</td><td>${size(unit.held)}</td></tr>`);
  const shown = units.length > 12 ? [...units.slice(0, 11), `<tr><td>… ${units.length - 11} more</td></tr>`] : units;
  return `<b>${back ? "Backward" : "Forward"}: ${eventName(stage, event)}</b><br>` +
    `${duration(ms)}${again > 0 ? `, ${duration(again)} of it recompute` : ""}` +
    `${aheadOf(stage, event) ? `, after ${duration(aheadOf(stage, event))} of recompute begun early` : ""}` +
    `${waited > 0 ? `, ${duration(waited)} of it waiting for copies` : ""}; begins at ${duration(stage.start[event])}<br>` +
    `at most ${size(stage.peak[event])} alive of ${size(stage.budget)}` +
    `<table><tr><th></th><th></th><th>time</th><th>held</th></tr>${shown.join("")}</table>`;
}

function waitTip(stage, event) {
  const from = event < 0 ? 0 : stage.end[event];
  const to = event + 1 < stage.count ? stage.start[event + 1] : data.step;
  const next = event + 1 < stage.count ? `for the ${stage.backward[event + 1] ? "backward" : "forward"} of ` +
    `microbatch ${stage.microbatch[event + 1]}` : "for the other stages to finish";
  return `<b>Waiting: stage ${stage.number}</b><br>${duration(to - from)} ${next}`;
}

function copyTip(stage, way, time) {
  const copy = stage.copies.ways[way].find(([from, to]) => from <= time && time <= to);
  if (!copy) return `<b>Stage ${stage.number}: nothing is copied to ${way ? "the device" : "host memory"}</b>`;
  const [from, to, name, microbatch, bytes] = copy;
  return `<b>To ${way ? "the device" : "host memory"}: ${escaped(name)}, microbatch ${microbatch}</b><br>` +
    `${size(bytes)} in ${duration(to - from)}; begins at ${duration(from)}`;
}

function memoryTip(stage, time) {
  const moment = momentAt(stage, time), sum = total(moment.parts);
  let doing = "waiting";
  if (moment.optimizer) doing = "optimizer step";
  else if (moment.unit !== undefined) {
    const unit = stage.chunks[stage.chunk[moment.event]].units[moment.unit];
    doing = `${stage.backward[moment.event] ? "backward" : "forward"} of ${unit.name}, microbatch ${stage.microbatch[moment.event]}`;
  }
  const rows = PARTS.map(([name, what], i) => moment.parts[i] === 0 ? "" : `<tr><td><span class="dot" ` +
    `style="background:var(--${name})"></span>${what}</td><td>${size(moment.parts[i])}</td></tr>`).reverse();
  const point = isRecorded(stage) ? recordedAt(time) : -1;
  const beside = point < 0 ? "" : `<br>recorded: ${size(recorded.bytes[point])}`;
  return `<b>Stage ${stage.number} at ${duration(time)}: ${size(sum)}</b> of ${size(stage.budget)}${beside}<br>` +
    `${escaped(doing)}<table>${rows.join("")}</table>`;
}

// ---------------------------------------------------------------- drawing

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "ink", "quiet", "line", "idle", "mark", "bad", "forward-0", "forward-1", "backward-0",
    "backward-1", "recompute-0", "recompute-1", "stall", "ahead", ...PARTS.map(part => part[0])];
  colours = Object.fromEntries(names.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
  const chunks = stages[0].chunks.length;
  for (const kind of ["forward", "backward", "recompute"]) {
    colours[kind] = Array.from({length: chunks}, (_, i) =>
      mixed(colours[`${kind}-0`], colours[`${kind}-1`], chunks > 1 ? i / (chunks - 1) : 0.7));
  }
}

function mixed(first, second, share) {
  const channel = (colour, i) => parseInt(colour.slice(i, i + 2), 16);
  const values = [1, 3, 5].map(i => Math.round(channel(first, i) * (1 - share) + channel(second, i) * share));
  return `rgb(${values.join()})`;
}

const few = stages => stages <= 8 ? 0 : stages <= 16 ? 1 : stages <= 32 ? 2 : 3;
const rowHeight = () => [26, 20, 14, 9][few(stages.length)];
const rowTop = i => i * rowHeight() + (i > focus ? waysHeight() : 0);
const waysHeight = () => stages[focus].copies ? 2 * WAY : 0; // of the stage that is drawn large
const laneHeight = i => i === focus ? 168 : [40, 30, 20, 12][few(stages.length)];
const laneTop = i => (i > focus ? laneHeight(focus) - laneHeight(-1) : 0) + i * laneHeight(-1);

function begun(canvas, height) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  ctx.font = "11px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  return [ctx, width - GUTTER];
}

const xOf = (time, width) => GUTTER + (time - view[0]) / (view[1] - view[0]) * width;
const timeAt = (x, width) => view[0] + (x - GUTTER) / width * (view[1] - view[0]);

function draw() {
  drawPipeline();
  drawMemory();
  placeCursor();
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function drawPipeline() {
  const height = rowHeight();
  const [ctx, width] = begun($("pipeline"), rowTop(stages.length) + AXIS);
  stages.forEach((stage, i) => {
    const y = rowTop(i) + 1, h = height - 2;
    ctx.fillStyle = colours.idle;
    ctx.fillRect(GUTTER, y, width, h);
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, y, width, h);
    ctx.clip();
    const perPixel = (view[1] - view[0]) / width;
    const visible = lastBegun(stage, view[1]) - lastBegun(stage, view[0]) + 1;
    if (visible > width / 1.5) drawDensity(ctx, stage, y, h, width, perPixel);
    else drawEvents(ctx, stage, y, h, width, perPixel);
    ctx.restore();
    if (i === focus && stage.copies) drawWays(ctx, stage, y + height, width, perPixel);
    if (height >= 14 || i % 4 === 0) label(ctx, `stage ${i}`, y + h / 2, i === focus);
  });
  axis(ctx, rowTop(stages.length), width);
}

// Copies to host memory, and below them those to the device.
function drawWays(ctx, stage, top, width, perPixel) {
  stage.copies.ways.forEach((copies, way) => {
    const y = top + way * WAY;
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, y, width, WAY - 2);
    ctx.clip();
    ctx.textAlign = "center";
    ctx.font = "10px system-ui, sans-serif";
    for (const [from, to, name] of copies) {
      if (to < view[0] || from > view[1]) continue;
      const x = xOf(from, width), w = (to - from) / perPixel;
      ctx.fillStyle = colours.copies;
      ctx.fillRect(x, y, Math.max(w > 3 ? w - 0.7 : w, 0.5), WAY - 2);
      ctx.fillStyle = "#000";
      if (w > 120) ctx.fillText(name, x + w / 2, y + WAY / 2 - 1);
    }
    ctx.restore();
    ctx.textAlign = "left";
    ctx.font = "10px system-ui, sans-serif";
    ctx.fillStyle = colours.quiet;
    ctx.fillText(way ? "to device" : "to host", 12, y + WAY / 2);
    ctx.font = "11px system-ui, sans-serif";
  });
}

function label(ctx, text, y, strong, quiet = "") {
  ctx.textAlign = "left";
  ctx.fillStyle = colours.ink;
  ctx.font = `${strong ? 600 : 400} 11px system-ui, sans-serif`;
  ctx.fillText(text, 2, y);
  ctx.font = "10px system-ui, sans-serif";
  ctx.fillStyle = colours.quiet;
  if (quiet) ctx.fillText(quiet, 2, y + 13);
  ctx.font = "11px system-ui, sans-serif";
}

// Recompute of an event that begins as soon as the event before ends, while the stage waits.
const aheadOf = (stage, e) => stage.ahead[e];

function drawEvents(ctx, stage, y, h, width, perPixel) {
  for (let e = Math.max(0, lastBegun(stage, view[0])); e < stage.count && stage.start[e] < view[1]; e++) {
    const x = xOf(stage.start[e], width), w = Math.max((stage.end[e] - stage.start[e]) / perPixel, 0.5);
    const c = stage.chunk[e], chunk = stage.chunks[c], back = stage.backward[e];
    const inner = w > 3 ? w - 0.7 : w; // a hair between neighbours
    ctx.fillStyle = colours[back ? "backward" : "forward"][c];
    ctx.fillRect(x, y, inner, h);
    if (back && chunk.recompute > 0) drawRecompute(ctx, stage, e, x, y, inner, h);
    ctx.fillStyle = colours.ahead;
    if (aheadOf(stage, e)) ctx.fillRect(xOf(stage.end[e - 1], width), y, aheadOf(stage, e) / perPixel, h);
    ctx.fillStyle = colours.stall;
    for (const [from, to] of waitsOf(stage, e)) ctx.fillRect(xOf(from, width), y, (to - from) / perPixel, h);
    if (w > 26) {
      ctx.fillStyle = c / stage.chunks.length > 0.45 || stage.chunks.length === 1 ? "#fff" : "#000";
      ctx.textAlign = "center";
      const text = w > 90 ? `${back ? "B" : "F"} microbatch ${stage.microbatch[e]}` : stage.microbatch[e];
      if (h > 8) ctx.fillText(text, Math.min(Math.max(x + w / 2, GUTTER + 14), GUTTER + width - 14), y + h / 2);
    }
  }
}

// Where there is room each unit's recompute stands before its own backward; where there is less, all of
// it first; and in a bar too narrow for that, its share of the height.
function drawRecompute(ctx, stage, e, x, y, w, h) {
  const c = stage.chunk[e], chunk = stage.chunks[c];
  ctx.fillStyle = colours.recompute[c];
  if (w < 8) {
    ctx.fillRect(x, y + h * (1 - chunk.recompute), w, h * chunk.recompute);
    return;
  }
  const length = stage.end[e] - stage.start[e], waited = waitedBefore(stage, e, Infinity);
  const computed = stage.copies ? chunk.own[1] : length; // what the units' spans are shares of
  const place = share => (share * computed + waitedBefore(stage, e, share * computed + 1e-6)) / length;
  const spans = w < 40 ? [[0, chunk.recompute * (1 - waited / length)]] : chunk.units.filter(unit => unit.recompute > 0).map(unit => {
    const [from, to] = unit.span[1];
    return [place(from), place(from + (to - from) * unit.recompute / unit.ms[1])];
  });
  for (const [from, to] of spans) {
    ctx.fillRect(x + from * w, y, (to - from) * w, h);
    if ((to - from) * w < 5) continue;
    ctx.save();
    ctx.beginPath();
    ctx.rect(x + from * w, y, (to - from) * w, h);
    ctx.clip();
    ctx.strokeStyle = "#0006";
    ctx.lineWidth = 1;
    ctx.beginPath();
    const left = Math.max(x + from * w, GUTTER - h), right = Math.min(x + to * w, GUTTER + 4000);
    for (let at = left - h - (left % 6); at < right; at += 6) { ctx.moveTo(at, y + h); ctx.lineTo(at + h, y); }
    ctx.stroke();
    ctx.restore();
  }
}

// More events than pixels: every column shows the shares of time in it, the rest is waiting.
function drawDensity(ctx, stage, y, h, width, perPixel) {
  const columns = Math.ceil(width), shares = [0, 1, 2, 3, 4].map(() => new Float64Array(columns));
  const add = (which, from, to) => {
    const first = Math.max(0, Math.floor(from)), last = Math.min(columns - 1, Math.floor(to));
    for (let x = first; x <= last; x++) shares[which][x] += Math.min(to, x + 1) - Math.max(from, x);
  };
  for (let e = Math.max(0, lastBegun(stage, view[0])); e < stage.count && stage.start[e] < view[1]; e++) {
    const begin = (stage.start[e] - view[0]) / perPixel, to = (stage.end[e] - view[0]) / perPixel;
    const from = begin + waitedBefore(stage, e, Infinity) / perPixel;
    if (from > begin) add(3, begin, from);
    const early = e ? (stage.end[e - 1] - view[0]) / perPixel : 0;
    if (aheadOf(stage, e)) add(4, early, early + aheadOf(stage, e) / perPixel);
    if (!stage.backward[e]) { add(0, from, to); continue; }
    const split = from + (to - from) * stage.chunks[stage.chunk[e]].recompute;
    add(2, from, split);
    add(1, split, to);
  }
  const middle = stage.chunks.length >> 1;
  let below = new Float64Array(columns);
  [["recompute", 2], ["backward", 1], ["forward", 0], ["stall", 3], ["ahead", 4]].forEach(([kind, which]) => {
    const top = below.map((value, x) => value + shares[which][x]);
    const colour = which > 2 ? colours[kind] : colours[kind][middle];
    area(ctx, below.map(share => y + h * (1 - share)), top.map(share => y + h * (1 - share)), colour);
    below = top;
  });
}

// Columns of equal height, to a quarter of a pixel, are one rectangle. Faster than one path around all.
function area(ctx, bottom, top, colour) {
  const quarter = y => Math.round(4 * y) / 4;
  ctx.fillStyle = colour;
  for (let from = 0, x = 1; x <= top.length; x++) {
    const high = quarter(top[from]), low = quarter(bottom[from]);
    if (x < top.length && quarter(top[x]) === high && quarter(bottom[x]) === low) continue;
    if (low > high) ctx.fillRect(GUTTER + from, high, x - from, low - high);
    from = x;
  }
}

function drawMemory() {
  const height = laneTop(stages.length - 1) + laneHeight(stages.length - 1);
  const [ctx, width] = begun($("memory"), height + AXIS);
  stages.forEach((stage, i) => drawLane(ctx, stage, laneTop(i) + MARK, laneHeight(i) - MARK - 2, width));
  axis(ctx, height, width);
}

function drawLane(ctx, stage, y, h, width) {
  const large = stage.number === focus, fullest = total(stage.fullest);
  const room = Math.max(stage.budget, fullest, recordedMost(stage)) * (large ? 1.04 : 1.01);
  const floor = floorOf(stage, room); // static bytes never change: a lane shows the upper part of them
  const yOf = bytes => y + h * (1 - Math.max(0, bytes - floor) / (room - floor));
  const columns = Math.ceil(width), tops = stackAt(stage, columns);
  let bottom = new Float64Array(columns).fill(y + h);
  tops.forEach((bytes, part) => {
    const top = bytes.map(yOf);
    area(ctx, bottom, top, colours[PARTS[part][0]]);
    bottom = top;
  });
  if (large) ticks(ctx, stage, room, floor, yOf, width);
  if (isRecorded(stage)) drawRecorded(ctx, yOf, width, columns);
  ctx.strokeStyle = colours.mark;
  ctx.setLineDash([5, 3]);
  line(ctx, GUTTER, yOf(stage.budget), GUTTER + width, yOf(stage.budget));
  ctx.setLineDash([]);
  if (h > 8) label(ctx, `stage ${stage.number}`, y + Math.min(h / 2, 11), large, h > 24 ? size(fullest) : "");
  markFullest(ctx, stage, yOf, width, large);
}

// Of every pixel column the most bytes recorded in it.
function drawRecorded(ctx, yOf, width, columns) {
  const perPixel = (view[1] - view[0]) / columns, most = new Float64Array(columns).fill(-1);
  recorded.at.forEach((at, i) => {
    const until = i + 1 < recorded.at.length ? recorded.at[i + 1] : at;
    const first = Math.max(0, Math.floor((at - view[0]) / perPixel));
    const last = Math.min(columns - 1, Math.floor((until - view[0]) / perPixel));
    for (let x = first; x <= last; x++) most[x] = Math.max(most[x], recorded.bytes[i]);
  });
  for (const [colour, thick] of [[colours.page, 4], [colours.bad, 2]]) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = thick;
    ctx.beginPath();
    most.forEach((bytes, x) => {
      if (bytes >= 0) { ctx.lineTo(GUTTER + x, yOf(bytes)); ctx.lineTo(GUTTER + x + 1, yOf(bytes)); }
    });
    ctx.stroke();
  }
  ctx.lineWidth = 1;
}

const floorOf = (stage, room) => Math.max(0, stage.static - 0.2 * (room - stage.static));

function ticks(ctx, stage, room, floor, yOf, width) {
  const unit = room >= GIB ? GIB : MIB, step = niceStep((room - floor) / unit / 5) * unit;
  ctx.textAlign = "left";
  ctx.fillStyle = "#000";
  ctx.fillText(`static ${size(stage.static)}${floor ? ", cut off below" : ""}`, GUTTER + 6, (yOf(stage.static) + yOf(floor)) / 2);
  ctx.textAlign = "right";
  for (let bytes = Math.ceil(floor / step) * step; bytes < room; bytes += step) {
    ctx.strokeStyle = colours.line;
    ctx.globalAlpha = 0.5;
    line(ctx, GUTTER, yOf(bytes), GUTTER + width, yOf(bytes));
    ctx.globalAlpha = 1;
    ctx.fillStyle = colours.quiet;
    ctx.fillText(size(bytes, 0), GUTTER - 4, yOf(bytes));
  }
}

function markFullest(ctx, stage, yOf, width, large) {
  const [from, to] = stage.binding ? spanOf(stage, ...stage.binding) : [data.step, end];
  const x = xOf((from + to) / 2, width), y = yOf(total(stage.fullest));
  if (x < GUTTER || x > GUTTER + width) return;
  ctx.fillStyle = colours.mark;
  ctx.beginPath();
  const r = large ? 6 : 4;
  ctx.moveTo(x, y); ctx.lineTo(x - r, y - 1.6 * r); ctx.lineTo(x + r, y - 1.6 * r);
  ctx.fill();
  if (!large) return;
  const short = `${size(total(stage.fullest))} of ${size(stage.budget)}`;
  for (const text of [`${short}: ${stage.moment}`, short]) { // the first that has room on one side
    const wide = ctx.measureText(text).width + 14, right = x + wide > GUTTER + width;
    if (right && x - wide < GUTTER) continue;
    ctx.textAlign = right ? "right" : "left";
    ctx.fillText(text, x + (right ? -11 : 11), y - 8);
    return;
  }
}

// Of every pixel column the fullest moment in it: the tops of its parts, from static upwards.
function stackAt(stage, columns) {
  const perPixel = (view[1] - view[0]) / columns, most = new Float64Array(columns).fill(-1);
  const who = new Int32Array(columns), what = new Int16Array(columns); // event and unit, -1 waiting, -2 optimizer
  const put = (from, to, bytes, event, unit) => {
    const last = Math.min(columns - 1, Math.max(Math.ceil((to - view[0]) / perPixel) - 1, Math.floor((from - view[0]) / perPixel)));
    for (let x = Math.max(0, Math.floor((from - view[0]) / perPixel)); x <= last; x++) {
      if (bytes > most[x]) { most[x] = bytes; who[x] = event; what[x] = unit; }
    }
  };
  for (let e = lastBegun(stage, view[0]); e < stage.count && (e < 0 || stage.start[e] < view[1]); e++) {
    if (e >= 0) {
      const units = stage.chunks[stage.chunk[e]].units;
      if (stage.end[e] - stage.start[e] < 2 * perPixel) put(stage.start[e], stage.end[e], stage.peak[e], e, stage.peakUnit[e]);
      else units.forEach((_, u) => put(...spanOf(stage, e, u), total(partsAt(stage, e, u)), e, u));
    }
    const from = e < 0 ? 0 : stage.end[e], to = e + 1 < stage.count ? stage.start[e + 1] : data.step;
    if (to > from) put(from, to, e < 0 ? total(partsAfter(stage, e)) : stage.after[e], e, -1);
  }
  if (view[1] > data.step && end > data.step) put(data.step, end, total(optimizerParts(stage)), 0, -2);
  const tops = PARTS.map(() => new Float64Array(columns));
  for (let x = 0; x < columns; x++) {
    if (most[x] < 0) continue;
    const parts = what[x] === -2 ? optimizerParts(stage) : what[x] === -1 ? partsAfter(stage, who[x]) : partsAt(stage, who[x], what[x]);
    let sum = 0;
    for (let part = 0; part < parts.length; part++) tops[part][x] = sum += parts[part];
  }
  return tops;
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(f => f * power).find(step => step >= least * 0.999);
}

function axis(ctx, y, width) {
  const step = niceStep((view[1] - view[0]) / Math.max(width / 110, 1));
  const inSeconds = view[1] >= 2000, digits = Math.max(0, -Math.floor(Math.log10(inSeconds ? step / 1000 : step) + 1e-9));
  ctx.textAlign = "center";
  for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) {
    const x = xOf(t, width);
    ctx.strokeStyle = colours.line;
    line(ctx, x, y, x, y + 4);
    ctx.fillStyle = colours.quiet;
    const text = inSeconds ? `${(t / 1000).toFixed(digits)} s` : `${t.toFixed(digits)} ms`;
    ctx.fillText(text, Math.min(Math.max(x, GUTTER + 14), GUTTER + width - 16), y + 12);
  }
}

// ---------------------------------------------------------------- pointing

function show(html, x, y) {
  const tip = $("tip");
  tip.innerHTML = html;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - box.width - 12 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - box.height - 4))}px`;
  tip.style.visibility = "visible";
}
const hide = () => { $("tip").style.visibility = "hidden"; };

function stageAtY(canvas, y) {
  if (canvas.id === "pipeline") return stages.findIndex((_, i) => y >= rowTop(i) && y < rowTop(i + 1));
  return stages.findIndex((_, i) => y >= laneTop(i) && y < laneTop(i) + laneHeight(i));
}

function pointed(canvas, mouse) {
  const box = canvas.getBoundingClientRect(), width = canvas.clientWidth - GUTTER;
  const x = mouse.clientX - box.left, stage = stages[stageAtY(canvas, mouse.clientY - box.top)];
  const below = canvas.id === "pipeline" && stage ? mouse.clientY - box.top - rowTop(stage.number) - rowHeight() : -1;
  return {x, width, stage, time: timeAt(x, width), way: below < 0 ? -1 : Math.min(1, Math.floor(below / WAY))};
}

function hover(canvas, mouse) {
  const {x, stage, time, way} = pointed(canvas, mouse);
  if (!stage || x < GUTTER || time < 0 || time > end) { hide(); return; }
  const moment = momentAt(stage, time);
  const tip = canvas.id === "memory" ? memoryTip(stage, time)
    : way >= 0 ? copyTip(stage, way, time)
    : moment.optimizer ? `<b>Optimizer step: stage ${stage.number}</b>`
    : moment.unit === undefined ? waitTip(stage, moment.event) : eventTip(stage, moment.event);
  show(tip, mouse.clientX, mouse.clientY);
}

function zoom(factor, around = (view[0] + view[1]) / 2) {
  const least = Math.min(end, Math.max(end / 1e6, 0.01));
  const length = Math.min(end, Math.max(least, (view[1] - view[0]) * factor));
  const from = around - (around - view[0]) * length / (view[1] - view[0]);
  look(from, length);
}

function look(from, length = view[1] - view[0]) {
  from = Math.min(Math.max(0, from), end - length);
  view = [from, from + length];
  hide();
  redraw();
}

function lookAtFullest() {
  const stage = stages[focus];
  if (!stage.binding) {
    cursor = null;
    look(end - end / 20, end / 20);
    $("said").textContent = `Optimizer step, stage ${stage.number}: at most ${size(total(stage.fullest))} alive`;
    return;
  }
  const [event] = stage.binding, length = Math.min(end, 24 * (stage.end[event] - stage.start[event]));
  cursor = {stage, event};
  look((stage.start[event] + stage.end[event] - length) / 2, length);
  tellCursor();
}

function listen(canvas) {
  let held = null;
  canvas.addEventListener("pointerdown", event => {
    held = {x: event.clientX, from: view[0], moved: false};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!held) { hover(canvas, event); return; }
    const width = canvas.clientWidth - GUTTER, by = event.clientX - held.x;
    held.moved ||= Math.abs(by) > 3;
    if (held.moved) look(held.from - by / width * (view[1] - view[0]));
  });
  canvas.addEventListener("pointerup", event => {
    const {stage, time} = pointed(canvas, event);
    if (held && !held.moved && stage) {
      focus = stage.number;
      const moment = momentAt(stage, time);
      cursor = moment.event >= 0 && moment.event < stage.count ? {stage, event: moment.event} : null;
      redraw();
      sayCursor();
    }
    held = null;
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("dblclick", event => zoom(0.4, pointed(canvas, event).time));
  canvas.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.003), pointed(canvas, event).time);
    else if (event.shiftKey || event.deltaX) look(view[0] + (event.deltaX || event.deltaY) / canvas.clientWidth * (view[1] - view[0]));
    else return; // the page scrolls
    event.preventDefault();
  }, {passive: false});
}

const KEYS = {
  "+": () => zoom(0.5, cursorTime()), "=": () => zoom(0.5, cursorTime()), "-": () => zoom(2, cursorTime()),
  "0": () => look(0, end), "p": lookAtFullest,
  "ArrowLeft": () => step(-1), "ArrowRight": () => step(1),
  "ArrowUp": () => pick(focus - 1), "ArrowDown": () => pick(focus + 1),
};

function cursorTime() {
  return cursor ? (cursor.stage.start[cursor.event] + cursor.stage.end[cursor.event]) / 2 : undefined;
}

function step(by) {
  const stage = stages[focus];
  let event = cursor && cursor.stage === stage ? cursor.event + by : Math.max(0, lastBegun(stage, (view[0] + view[1]) / 2));
  event = Math.min(Math.max(event, 0), stage.count - 1);
  cursor = {stage, event};
  const length = view[1] - view[0];
  if (stage.start[event] < view[0] || stage.end[event] > view[1]) look(stage.start[event] - length / 3);
  draw();
  tellCursor();
}

function pick(number) {
  focus = Math.min(Math.max(number, 0), stages.length - 1);
  if (cursor) cursor = {stage: stages[focus], event: Math.max(0, lastBegun(stages[focus], cursorTime()))};
  draw();
  tellCursor();
}

function cursorBox() {
  const canvas = $("pipeline"), width = canvas.clientWidth - GUTTER, {stage, event} = cursor;
  const x0 = Math.max(GUTTER, xOf(stage.start[event], width)), x1 = Math.min(GUTTER + width, xOf(stage.end[event], width));
  return [x0, rowTop(stage.number), Math.max(x1 - x0, 2), rowHeight()];
}

function placeCursor() {
  if (!cursor) return;
  const [x, y, w, h] = cursorBox(), ctx = $("pipeline").getContext("2d");
  ctx.strokeStyle = colours.mark;
  ctx.lineWidth = 2;
  ctx.strokeRect(x, y + 1, w, h - 2);
}

// The status line: of the event under the cursor, or empty.
function sayCursor() {
  const {stage, event} = cursor || {};
  $("said").textContent = !cursor ? "\u00a0" : `${stage.backward[event] ? "Backward" : "Forward"}, ${eventName(stage, event)}: ` +
    `${duration(stage.end[event] - stage.start[event])} from ${duration(stage.start[event])}, at most ${size(stage.peak[event])} alive`;
}

function tellCursor() {
  sayCursor();
  if (!cursor) return;
  const box = $("pipeline").getBoundingClientRect(), [x, y, w, h] = cursorBox(), {stage, event} = cursor;
  show(eventTip(stage, event), box.left + x + w / 2, box.top + y + h);
}

// ---------------------------------------------------------------- the rest of the page

function listenTips() {
  for (const title of document.querySelectorAll(".curve title")) {
    const element = title.parentElement, words = title.textContent;
    title.remove();
    element.setAttribute("aria-label", words);
    element.setAttribute("role", "img");
    element.setAttribute("tabindex", 0);
    const tell = () => {
      const box = element.getBoundingClientRect();
      show(escaped(words).replaceAll("\n", "<br>"), box.right, box.top);
    };
    element.addEventListener("mouseenter", tell);
    element.addEventListener("focus", tell);
    element.addEventListener("mouseleave", hide);
    element.addEventListener("blur", hide);
  }
}

function listenCopy() {
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const source = $(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch { // no permission: at least select it
        getSelection().selectAllChildren(source);
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
}

function writeKeys() {
  const chunks = stages[0].chunks.length;
  const ramp = kind => `<span class="key"><i class="${chunks > 1 ? "ramp" : ""}${kind === "recompute" ? " hatched" : ""}" style="background-color:${colours[kind][chunks >> 1]};` +
    (chunks > 1 && kind !== "recompute" ? `background-image:linear-gradient(90deg,${colours[kind].map((c, i) => `${c} ${100 * i / chunks}% ${100 * (i + 1) / chunks}%`).join()})` : "") + `"></i>${kind}</span>`;
  $("pipeline-keys").innerHTML = `<b>Pipeline</b> &nbsp; ${["forward", "backward", "recompute"].map(ramp).join("")}` +
    (stages.some(stage => stage.ahead.some(Boolean)) ? `<span class="key"><i style="background:var(--ahead)"></i>recompute begun early</span>` : "") +
    `<span class="key"><i style="background:var(--idle)"></i>waiting (bubble)</span>` + (stages.some(stage => stage.copies) ? `<span class="key"><i style="background:var(--stall)"></i>waiting for copies</span>` +
    `<span class="key"><i style="background:var(--copies)"></i>copies of the stage that is picked</span>` : "") +
    (chunks > 1 ? `<span class="quiet">light: chunk 0, dark: chunk ${chunks - 1}</span>` : "");
  $("memory-keys").innerHTML = `<b>Memory</b> &nbsp; ` + [...PARTS].reverse().filter(([name]) => name !== "copies" || stages.some(stage => stage.copies)).map(([name, what]) =>
    `<span class="key"><i style="background:var(--${name})"></i>${what}</span>`).join("") +
    `<span class="key">┄ budget</span><span class="key">▼ fullest moment</span>` +
    (recorded ? `<span class="key" style="color:var(--bad)">━ recorded, stage ${recorded.stage}</span>` : "");
}

async function begin() {
  data = await unpacked($("data").textContent);
  stages = data.stages.map(stageOf);
  recorded = recordedOf(data.recorded);
  end = data.step * (stages.some(stage => stage.optimizer > 0) ? 1.012 : 1);
  view = [0, end];
  focus = recorded ? recorded.stage : data.tightest;
  readColours();
  writeKeys();
  ["pipeline", "memory"].forEach(id => listen($(id)));
  $("pipeline").addEventListener("keydown", event => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  $("pipeline").addEventListener("blur", hide);
  $("in").onclick = () => zoom(0.5);
  $("out").onclick = () => zoom(2);
  $("all").onclick = () => look(0, end);
  $("peak").onclick = () => { $("pipeline").focus({preventScroll: true}); lookAtFullest(); };
  listenTips();
  listenCopy();
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => { readColours(); writeKeys(); draw(); });
  }
  new ResizeObserver(redraw).observe($("pipeline"));
  draw();
  document.documentElement.dataset.ready = "yes";
}

begin();
