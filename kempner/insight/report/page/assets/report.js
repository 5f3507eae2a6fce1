"use strict";
// Draws the plots that the page's data describe; all else on the page needs no script.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const show = (value) => (value == null ? "–" : number.format(value));
  let drawn = [];

  // Vertical lines where the run was interrupted, with the numbers that the tables have.
  function marks(plot) {
    return (u) => {
      const { ctx, bbox } = u;
      const ratio = devicePixelRatio || 1;
      ctx.save();
      ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      let free = -Infinity;
      for (const mark of plot.marks) {
        const x = Math.round(u.valToPos(mark.x, "x", true));
        if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
        ctx.strokeStyle = ctx.fillStyle = css(mark.failed ? "--bad" : "--asked");
        ctx.lineWidth = ratio;
        ctx.setLineDash([4 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        if (x - free > 14 * ratio) {
          ctx.fillText(mark.name, x, bbox.top - 4 * ratio);
          free = x;
        }
      }
      ctx.restore();
    };
  }

  function draw(figure) {
    const plot = plots[Number(figure.dataset.plot)];
    const place = figure.lastElementChild;
    const data = uPlot.join(plot.series.map((series) => [series.x, series.y]));
    const axis = {
      stroke: css("--dim"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: css("--line"), width: 1 },
      ticks: { stroke: css("--line"), width: 1 },
      values: (_, splits) => splits.map((value) => (value == null ? "" : compact.format(value))),
    };
    const options = {
      width: place.clientWidth,
      height: place.clientWidth < 600 ? 200 : 240,
      padding: [18, 12, 0, 0],
      scales: { x: { time: false } },
      axes: [
        { ...axis, label: plot.axis === "step" ? "step" : `${plot.axis} since the start`, labelFont: "12px system-ui, sans-serif", labelSize: 18, size: 32 },
        { ...axis, size: 52 },
      ],
      series: [
        { label: plot.axis, value: (_, value) => show(value) },
        ...plot.series.map((series) => ({
          label: series.name,
          stroke: css(`--c${series.color % 6}`),
          width: 1.5,
          dash: series.dashed ? [6, 4] : undefined,
          points: { show: Boolean(series.points), size: 6 },
          value: (_, value) => show(value),
        })),
      ],
      hooks: { draw: [marks(plot)] },
    };
    place.textContent = "";
    drawn.push(new uPlot(options, data, place));
  }

  function drawAll() {
    drawn.forEach((plot) => plot.destroy());
    drawn = [];
    document.querySelectorAll("figure[data-plot]").forEach(draw);
  }

  drawAll();
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    drawAll();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", drawAll);
})();
