// Draws what the JSON blocks hold, switches between ranks. Computes no figure: bytes become GiB for the axes.

// Owner -> colour, by the first rule that fits.
const COLOURS = [
  [/^tensors: weights/, "weights"], [/^tensors: KV/, "kv"], [/^tensors: other/, "tensors"], [/^tensors/, "undivided"], [/^cached|^reserved/, "cached"],
  [/^context/, "context"], [/^communicator/, "communicator"], [/^atb/, "atb"], [/^graph/, "graph"],
  [/^runtime|^cann_/, "runtime"], [/workspace/, "workspace"], [/^unexplained/, "rest"], [/./, "others"],
];


// Seconds to places: themselves, or the number of the reading, with whatever is between two readings between them.
function places(moments, byReading) {
  if (!byReading) return (seconds) => seconds;
  return (seconds) => {
    const next = moments.findIndex((moment) => moment.seconds >= seconds);
    if (next === -1) return moments.length - 1;
    if (next === 0) return 0;
    const low = moments[next - 1].seconds, high = moments[next].seconds;
    return next - 1 + (high > low ? (seconds - low) / (high - low) : 1);
  };
}

function timeline(view, gib, byReading) {
  const line = view.timeline;
  const at = places(line.moments, byReading);
  const x = line.moments.map((moment, i) => (byReading ? i : moment.seconds));
  const where = line.moments.map((m) => plain((m.edge === "before" ? say("before {phase}", { phase: m.phase }) : say("after {phase}", { phase: m.phase })) + ", " + m.seconds.toFixed(3) + " s"));
  const size = (bytes) => (bytes === null ? null : bytes / gib);
  const last = x[x.length - 1];
  const shades = {};
  const traces = line.owners.map((owner) => {
    const name = COLOURS.find((rule) => rule[0].test(owner.name))[1];
    shades[name] = (shades[name] || 0) + 1;
    const pattern = { shape: ["", "/", "\\", "x", "-", "|", "+", "."][(shades[name] - 1) % 8], size: 6, fgcolor: colour("page") };
    return {
      type: "scatter", mode: "lines", stackgroup: "owners", name: plain(owner.title) + (owner.how === "modelled" ? " (m)" : ""), x: x, y: owner.bytes.map(size),
      line: { width: 0.6, color: colour("page") }, fillcolor: colour(name), fillpattern: { ...pattern, bgcolor: colour(name) },
      hovertemplate: "%{y:.4f} GiB",
    };
  });
  traces.push({
    type: "scatter", mode: "lines+markers", name: say("in use, as read"), x: x, y: line.in_use.map(size), text: where,
    line: { width: 1.2, color: colour("text") }, marker: { size: 4, color: colour("text") },
    hovertemplate: "%{y:.4f} GiB, %{text}",
  });
  for (const what of ["in use", "allocated"]) {
    const peaks = line.peaks.filter((peak) => peak.what === what);
    if (!peaks.length) continue;
    const title = what === "in use" ? say("peak in use") : say("peak allocated");
    traces.push({
      type: "scatter", mode: "markers", name: title, x: peaks.map((p) => at(p.seconds)), y: peaks.map((p) => size(p.bytes)),
      marker: { size: 10, symbol: "diamond" + (what === "in use" ? "" : "-open"), color: colour("budget"), line: { width: 2, color: colour("budget") } },
      text: peaks.map((p) => plain(p.where + (p.exact ? "" : say(", time not known")))), hovertemplate: "%{y:.4f} GiB, %{text}",
    });
  }
  const drawn = narrow() ? 340 : 460, rows = narrow() ? traces.length : Math.ceil(traces.length / 6);
  const below = 66 + 19 * rows;
  const layout = base(28 + drawn + below, { l: 46, r: 12, t: 28, b: below });
  layout.hovermode = "x unified";
  layout.uniformtext = { mode: "hide", minsize: 9 };
  layout.xaxis = { ...layout.xaxis, title: { text: byReading ? say("readings, in their order") : say("seconds"), standoff: 4 }, range: [Math.min(0, x[0]), last || 1], anchor: "y2" };
  layout.yaxis = { ...layout.yaxis, title: { text: "GiB" }, domain: [0.24, 1], rangemode: "tozero" };
  layout.legend = { orientation: "h", traceorder: "normal", y: -54 / drawn, yanchor: "top", font: { size: 11 } };
  layout.shapes = [];
  layout.annotations = [];
  // phases: the outermost as bands behind the stack, all of them in the strip below
  const bands = line.bands.map((band) => ({ ...band, from: at(band.start), to: band.end === null ? last : at(band.end) }));
  const outer = bands.filter((band) => band.depth === 0);
  outer.forEach((band, i) => {
    layout.shapes.push({
      type: "rect", x0: band.from, x1: band.to, y0: 0.24, y1: 1, yref: "paper", layer: "below", line: { width: 0 },
      fillcolor: i % 2 ? "rgba(0,0,0,0)" : colour("band"),
    });
    if (band.to - band.from > (narrow() ? 0.2 : 0.09) * last) {
      layout.annotations.push({
        x: (band.from + band.to) / 2, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: plain(band.phase), font: { size: 11, color: colour("soft") },
      });
    }
  });
  for (const band of bands.filter((each) => each.phase === "oom")) {
    layout.shapes.push({ type: "line", x0: band.from, x1: band.from, y0: 0.24, y1: 1, yref: "paper", line: { color: colour("error"), width: 2 } });
    layout.annotations.push({
      x: band.from, y: 0.62, yref: "paper", xanchor: band.from > last / 2 ? "right" : "left", showarrow: false, text: say("out of memory"),
      bgcolor: colour("page"), font: { size: 12, color: colour("error") },
    });
  }
  const deepest = Math.max(0, ...bands.map((band) => band.depth));
  layout.yaxis2 = { domain: [0, 0.2], range: [-deepest - 0.5, 0.5], visible: false, fixedrange: true };
  traces.push({
    type: "bar", orientation: "h", yaxis: "y2", showlegend: false, base: bands.map((b) => b.from),
    x: bands.map((b) => Math.max(b.to - b.from, last / 2000)), y: bands.map((b) => -b.depth), width: 0.86,
    marker: { color: bands.map((b) => colour(b.end === null || b.phase === "oom" ? "error" : "cached")), line: { width: 1, color: colour("page") } },
    text: bands.map((b) => plain(b.phase)), textposition: "inside", insidetextanchor: "middle", textangle: 0,
    textfont: { color: bands.map((b) => colour(b.end === null || b.phase === "oom" ? "page" : "text")), size: 11 },
    hovertemplate: bands.map((b) => plain(b.phase) + (b.end === null ? say(", never left") : ", " + (b.end - b.start).toFixed(3) + " s") + "<extra></extra>"),
  });
  const levels = [[say("device total"), view.device_total_bytes, "solid", "soft"], [say("requested"), view.requested_bytes, "dash", "budget"]];
  for (const [name, bytes, dash, tone] of levels) {
    if (bytes === null) continue;
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: size(bytes), y1: size(bytes), line: { color: colour(tone), width: 2, dash: dash } });
    layout.annotations.push({
      xref: "paper", x: 0.004, y: size(bytes), xanchor: "left", yanchor: dash === "dash" ? "top" : "bottom", showarrow: false,
      text: name + " " + size(bytes).toFixed(2) + " GiB", font: { size: 11, color: colour(tone === "soft" ? "text" : tone) },
    });
  }
  line.peaks.forEach((peak) => {
    layout.annotations.push({
      x: at(peak.seconds), y: size(peak.bytes), text: (peak.what === "in use" ? say("peak in use") : say("peak allocated")) + "<br>" + size(peak.bytes).toFixed(2) + " GiB",
      arrowcolor: colour("text"), arrowhead: 2, arrowwidth: 1, ax: peak.what === "in use" && at(peak.seconds) < 0.8 * last ? 44 : -44, ay: peak.what === "in use" ? -46 : -60,
      bgcolor: colour("page"), bordercolor: colour("line"), borderpad: 3, font: { size: 11 },
    });
  });
  if (line.worst_bytes !== null) {
    const worst = line.in_use.findIndex((bytes) => bytes === line.worst_bytes);
    if (worst !== -1) {
      layout.annotations.push({
        x: x[worst], y: size(line.worst_bytes), text: say("most in use") + "<br>" + size(line.worst_bytes).toFixed(2) + " GiB",
        arrowcolor: colour("text"), arrowhead: 2, arrowwidth: 1, ax: -60, ay: 60, bgcolor: colour("page"), bordercolor: colour("line"), borderpad: 3, font: { size: 11 },
      });
    }
  }
  return [traces, layout];
}

// Curves of what was sampled, as bands; requests as bars in the strip below, in the same time.
function serving(view, gib) {
  const served = view.serving;
  const size = (bytes) => (bytes === null ? null : bytes / gib);
  const tones = { reserved_bytes: "context", allocated_bytes: "kv" };
  const traces = [];
  for (const curve of served.curves) {
    const tone = colour(tones[curve.name]);
    traces.push({
      type: "scatter", mode: "lines", x: served.seconds, y: curve.low.map(size), line: { width: 0, color: tone, shape: "vh" }, showlegend: false, hoverinfo: "skip",
    });
    traces.push({
      type: "scatter", mode: "lines", name: plain(curve.title), x: served.seconds, y: curve.high.map(size), fill: "tonexty", line: { width: 1.4, color: tone, shape: "vh" },
      text: curve.low.map((bytes) => (bytes === null ? "" : size(bytes).toFixed(4))), hovertemplate: say("{low} to {high} GiB", { low: "%{text}", high: "%{y:.4f}" }),
    });
  }
  const bars = served.bars;
  const lanes = bars.reduce((most, bar) => Math.max(most, bar.lane + 1), 0);
  const strip = Math.min(0.4, 0.08 + 0.03 * lanes), span = served.seconds[served.seconds.length - 1] - served.seconds[0];
  if (bars.length) {
    traces.push({
      type: "bar", orientation: "h", yaxis: "y2", name: say("requests"), base: bars.map((bar) => bar.begin),
      x: bars.map((bar) => Math.max(bar.end - bar.begin, span / 2000)), y: bars.map((bar) => -bar.lane), width: 0.8,
      marker: { color: bars.map((bar) => colour(bar.failed ? "error" : "weights")), line: { width: 1, color: colour("page") } },
      hovertemplate: bars.map((bar) => plain(bar.id) + ", " + (bar.end - bar.begin).toFixed(3) + " s" + (bar.peak_bytes === null ? "" : ", " + (bar.exact ? "" : "≥ ") + size(bar.peak_bytes).toFixed(4) + " GiB") + "<extra></extra>"),
    });
  }
  const layout = base(narrow() ? 420 : 500, { l: 46, r: 12, t: 20, b: 90 });
  layout.xaxis = { ...layout.xaxis, title: { text: say("seconds"), standoff: 4 }, anchor: bars.length ? "y2" : "y" };
  layout.yaxis = { ...layout.yaxis, title: { text: "GiB" }, domain: [bars.length ? strip + 0.04 : 0, 1] };
  layout.yaxis2 = { domain: [0, strip], range: [-Math.max(lanes, 1) + 0.5, 0.5], visible: false, fixedrange: true };
  layout.legend = { orientation: "h", y: -0.14, yanchor: "top" };
  layout.showlegend = true;
  return [traces, layout];
}

function skew(data) {
  const mib = data.gib / 1024;
  const symbols = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon"];
  const tones = ["weights", "context", "kv", "communicator", "atb", "graph", "workspace", "others"];
  const many = data.labels.length > 16;
  const traces = data.skew.map((row, i) => ({
    ...(many ? { type: "scatter", mode: "markers" } : { type: "bar", textposition: "none" }), name: plain(row.title), x: data.labels.map((_, rank) => rank),
    y: row.bytes.map((bytes) => (bytes === null ? null : (bytes - row.median) / mib)), text: data.labels.map(plain),
    marker: { color: colour(tones[i % 8]), ...(many ? { symbol: symbols[i % 8], size: 6 } : {}) },
    hovertemplate: "%{text}: %{y:+,.2f} MiB",
  }));
  const layout = base(380, { l: 64, r: 12, t: 20, b: 90 });
  const every = Math.ceil(data.labels.length / (narrow() ? 6 : 16));
  const ticks = data.labels.map((_, rank) => rank).filter((rank) => rank % every === 0);
  layout.xaxis = { ...layout.xaxis, tickvals: ticks, ticktext: ticks.map((rank) => plain(data.labels[rank])), range: [-0.5, data.labels.length - 0.5] };
  layout.yaxis = { ...layout.yaxis, title: { text: say("MiB against the median rank") } };
  layout.legend = { orientation: "h", y: -0.15, yanchor: "top" };
  layout.showlegend = true;
  layout.bargap = 0.5;
  return [traces, layout];
}

function start(run) {
  const data = JSON.parse(run.querySelector("script.data").textContent);
  const selector = run.querySelector("select.ranks");
  const byReading = run.querySelector("input.by-reading");
  const shown = () => (selector ? Number(selector.value) : 0);

  function put(name, figure, text) {
    const plot = run.querySelector(".plot." + name);
    if (!plot || !plot.closest("details").open) return;
    if (figure === null) {
      Plotly.purge(plot);
      plot.replaceChildren();
      return;
    }
    if (text !== undefined) plot.setAttribute("aria-label", text);
    Plotly.react(plot, figure[0], figure[1], CONFIG);
    // the label, the caption and the table say it in words; the buttons above the plot have names of their own
    document.querySelectorAll(".plot svg, #js-plotly-tester").forEach((drawing) => drawing.setAttribute("aria-hidden", "true"));
  }

  function draw() {
    const view = data.views[shown()];
    if (!view || !window.Plotly) return;
    const text = (name) => run.querySelector('.view[data-view="' + shown() + '"] .' + name + "-text").textContent;
    put("timeline", view.timeline === null ? null : timeline(view, data.gib, byReading.checked), text("timeline"));
    put("serving", view.serving === null ? null : serving(view, data.gib), view.serving === null ? undefined : text("serving"));
    for (const part of run.querySelectorAll(".equal, .explains-timeline")) part.hidden = view.timeline === null;
    put("skew", data.skew.length ? skew(data) : null);
  }

  function choose() {
    for (const panel of run.querySelectorAll(".view")) panel.hidden = Number(panel.dataset.view) !== shown();
    run.querySelector(".controls [role=status]").textContent = say("Showing {what}", { what: data.views[shown()].labels });
    draw();
  }

  if (selector) selector.addEventListener("change", choose);
  if (byReading) byReading.addEventListener("change", draw);
  for (const part of run.querySelectorAll("details:has(.plot)")) part.addEventListener("toggle", draw);
  const form = run.querySelector("form.controls");
  if (form) form.addEventListener("submit", (event) => event.preventDefault());
  draw();
  return draw;
}

keepDrawn(Array.from(document.querySelectorAll(".run"), start).filter(Boolean));
