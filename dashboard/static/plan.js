"use strict";
// The Plan page: every move of a slider asks the server again, and the address keeps the choice.
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("plan");
  const figure = document.querySelector("figure[data-name=plan]");
  const table = document.getElementById("predictions");
  let waiting = null;

  // Sliders of wide ranges move in equal ratios: their value is the exponent of 10.
  const value = (input) => {
    const raw = Number(input.value);
    if (input.dataset.scale !== "log") return raw;
    return Number((10 ** raw).toPrecision(3));
  };
  const query = () => {
    const found = new URLSearchParams();
    for (const one of form.elements) {
      if (one.dataset.name && !(one.dataset.unset && one.dataset.touched !== "yes")) {
        found.set(one.dataset.name, one.type === "range" ? value(one) : one.value);
      }
    }
    return found;
  };
  const label = (input) => {
    const output = document.getElementById(`${input.id}-now`);
    if (output) output.textContent = `${value(input).toLocaleString("en")} ${input.dataset.unit}`;
  };

  async function ask() {
    const found = query();
    history.replaceState(null, "", `/plan?${found}`);
    figure.dataset.figure = `/api/figures/plan?${found}`;
    if (figure.dataset.drawn) window.gockptDraw(figure);
    const answer = await fetch(`/plan?${found}`);
    const made = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = made.getElementById("predictions");
    if (fresh) table.replaceChildren(...fresh.childNodes);
    else table.textContent = made.querySelector("main").textContent;
  }

  form.querySelector("button").hidden = true;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    const input = event.target;
    input.dataset.touched = "yes";
    if (input.dataset.name === "model" || input.dataset.name === "profile") {
      // Another machine or model has its own tokens and link.
      for (const one of form.querySelectorAll("[data-unset]")) one.dataset.touched = "";
    }
    label(input);
    clearTimeout(waiting);
    waiting = setTimeout(ask, 150);
  });
});
