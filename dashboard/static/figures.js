"use strict";
// Draws every <figure data-figure="address">: fetches it as JSON and gives it to Plotly. Figures are
// fetched when they come near the screen, and again when light changes to dark.
(() => {
  const NARROW = 560;

  const settings = (name) => ({
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    toImageButtonOptions: { format: "png", filename: name, scale: 2 },
  });

  const say = (canvas, words, state) => {
    canvas.textContent = words;
    canvas.className = `canvas ${state}`;
  };

  async function draw(place) {
    const canvas = place.querySelector(".canvas");
    const address = new URL(place.dataset.figure, location.href);
    address.searchParams.set("theme", window.gockptTheme());
    const asked = (place.asked = address.href);
    try {
      const answer = await fetch(address);
      const figure = await answer.json();
      if (!answer.ok) throw new Error(figure.detail || answer.statusText);
      if (place.asked !== asked) return; // another one was asked for meanwhile
      if (canvas.classList.contains("waiting") || canvas.classList.contains("failed")) {
        canvas.textContent = "";
        canvas.className = "canvas";
      }
      if (innerWidth < NARROW) figure.layout.font = { ...figure.layout.font, size: 11 };
      const name = `gockpt-${place.dataset.name}`;
      await Plotly.react(canvas, figure.data, figure.layout, settings(name));
      place.dataset.drawn = "yes";
      tools(place, canvas, name);
    } catch (error) {
      if (place.dataset.drawn) return; // the last one stays
      say(canvas, `This figure could not be drawn: ${error.message}`, "failed");
      place.dataset.drawn = "failed";
    }
  }

  function tools(place, canvas, name) {
    if (place.querySelector(".tools")) return;
    const bar = document.createElement("div");
    bar.className = "tools";
    for (const format of ["png", "svg"]) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = format.toUpperCase();
      button.setAttribute("aria-label", `Download this figure as ${format.toUpperCase()}`);
      button.addEventListener("click", () =>
        Plotly.downloadImage(canvas, {
          format, filename: name, width: canvas.clientWidth, height: canvas.clientHeight,
          scale: format === "png" ? 2 : 1,
        }));
      bar.append(button);
    }
    place.append(bar);
  }

  window.gockptDraw = draw;
  document.addEventListener("DOMContentLoaded", () => {
    const places = [...document.querySelectorAll("figure[data-figure]")];
    const near = new IntersectionObserver((seen) => {
      for (const one of seen.filter((entry) => entry.isIntersecting)) {
        near.unobserve(one.target);
        draw(one.target);
      }
    }, { rootMargin: "300px" });
    places.forEach((place) => near.observe(place));
    document.addEventListener("themechange", () =>
      places.filter((place) => place.dataset.drawn).forEach(draw));
  });
})();
