"use strict";
// Draws the figures of a report from the JSON in the page, again when light changes to dark.
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const draw = () => document.querySelectorAll(".canvas").forEach((canvas, n) => {
    const { data, layout } = content.figures[n];
    const template = content.templates[dark.matches ? "dark" : "light"];
    Plotly.react(canvas, data, { ...layout, template }, content.config);
  });

  dark.addEventListener("change", draw);
  draw();
})();
