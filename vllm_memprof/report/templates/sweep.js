// Draws the curves of a sweep: one plot per option, a line per combination of the others. Computes no figure.

const TONES = ["weights", "context", "kv", "communicator", "atb", "graph", "workspace", "others"];
const SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

// A trace for each line, in the legend where there are several.
function named(found, figure, shape, size, says) {
  const broken = narrow() ? "<br>" : ", ";
  return found.lines.map((line, i) => ({
    ...shape, name: plain(line.name).replace(/, /g, broken), x: line.places, y: size(line), text: says(line, ""),
    line: { width: 2, color: colour(TONES[i % 8]), dash: DASHES[Math.floor(i / 8) % 4] }, marker: { size: 8, symbol: SYMBOLS[i % 8], color: colour(TONES[i % 8]) },
    showlegend: found.lines.length > 1 && line.figures[figure.name].some((y) => y !== null),
  }));
}

// Of many lines those of one colour are one trace, with a gap after each.
function unnamed(found, shape, size, says) {
  return TONES.map((tone, at) => {
    const lines = found.lines.filter((_, i) => i % TONES.length === at);
    return {
      ...shape, x: lines.flatMap((line) => [...line.places, null]), y: lines.flatMap((line) => [...size(line), null]),
      text: lines.flatMap((line) => [...says(line, line.name + ", "), ""]),
      line: { width: 1, color: colour(tone) }, marker: { size: 5, symbol: SYMBOLS[at], color: colour(tone) }, showlegend: false,
    };
  });
}

function curve(data, found, figure) {
  const unit = figure.unit === "GiB" ? data.gib : 1;
  const format = figure.unit === "GiB" ? ",.4f" : figure.unit === "requests" ? ",.2f" : ",d";
  const size = (line) => line.figures[figure.name].map((y) => (y === null ? null : y / unit));
  const says = (line, before) => line.values.map((value) => plain(before + found.knob + " = " + value));
  const shape = { type: "scatter", mode: "lines+markers", connectgaps: false };
  const hover = "%{text}: %{y:" + format + "}" + (figure.unit === "GiB" ? " GiB" : "");
  const traces = found.named ? named(found, figure, { ...shape, hovertemplate: hover }, size, says) : unnamed(found, { ...shape, hovertemplate: hover + "<extra></extra>" }, size, says);
  const failed = found.failed;
  if (failed.places.length) {
    traces.push({
      type: "scatter", mode: "markers", name: say("did not come up"), x: failed.places, y: failed.places.map(() => 0), yaxis: "y2",
      marker: { size: 9, symbol: "x", color: colour("error") }, text: failed.texts.map(plain), hovertemplate: "%{text}<extra></extra>", showlegend: true,
    });
  }
  const shown = traces.filter((trace) => trace.showlegend).length;
  const rows = narrow() ? shown * Math.max(1, found.others) : Math.ceil(shown / 3);
  const below = 62 + 20 * rows, drawn = narrow() ? 260 : 340;
  const layout = base(drawn + 24 + below, { l: narrow() ? 76 : 100, r: 16, t: 24, b: below });
  const many = found.ticks.length > (narrow() ? 6 : 16) ? Math.ceil(found.ticks.length / (narrow() ? 6 : 16)) : 1;
  const kept = found.ticks.filter((_, i) => i % many === 0);
  layout.xaxis = { ...layout.xaxis, title: { text: plain(found.knob), standoff: 6 }, tickvals: kept.map((tick) => tick[0]), ticktext: kept.map((tick) => plain(tick[1])), anchor: failed.places.length ? "y2" : "y", zeroline: false };
  layout.yaxis = { ...layout.yaxis, title: { text: figure.title, standoff: 12 }, domain: [failed.places.length ? 0.14 : 0, 1], tickformat: figure.unit === "GiB" ? ",.2~f" : ",~r", automargin: true };
  layout.yaxis2 = { domain: [0, 0.08], range: [-1, 1], visible: false, fixedrange: true };
  layout.legend = { orientation: "h", traceorder: "normal", y: -54 / drawn, yanchor: "top", font: { size: 11 } };
  layout.showlegend = shown > 0;
  return [traces, layout];
}

function start(run) {
  const data = JSON.parse(run.querySelector("script.data").textContent);
  const selector = run.querySelector("select.figure");

  function draw() {
    const figure = data.figures[Number(selector.value)];
    for (const plot of run.querySelectorAll(".plot.curve")) {
      const figureOf = curve(data, data.curves[Number(plot.dataset.curve)], figure);
      Plotly.react(plot, figureOf[0], figureOf[1], CONFIG);
    }
    for (const title of run.querySelectorAll(".figure-title")) title.textContent = figure.title;
    document.querySelectorAll(".plot svg, #js-plotly-tester").forEach((drawing) => drawing.setAttribute("aria-hidden", "true"));
  }

  selector.addEventListener("change", () => {
    draw();
    run.querySelector(".controls [role=status]").textContent = say("Showing {what}", { what: data.figures[Number(selector.value)].title });
  });
  run.querySelector("form.controls").addEventListener("submit", (event) => event.preventDefault());
  draw();
  return draw;
}

keepDrawn(Array.from(document.querySelectorAll(".run"), start));
