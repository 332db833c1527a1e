"use strict";
// Light or dark: by the system's choice until the button says otherwise. Runs before the page is
// drawn, so that it does not flash.
(() => {
  const KEY = "gockpt-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem(KEY); } catch { /* no storage: the system's choice */ }

  const current = () => chosen || (system.matches ? "dark" : "light");
  const apply = () => {
    if (chosen) document.documentElement.dataset.theme = chosen;
    document.dispatchEvent(new Event("themechange"));
  };

  window.gockptTheme = current;
  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => { button.textContent = current() === "dark" ? "☀ Light" : "☾ Dark"; };
    button.hidden = false;
    button.addEventListener("click", () => {
      chosen = current() === "dark" ? "light" : "dark";
      try { localStorage.setItem(KEY, chosen); } catch { /* kept for this page only */ }
      apply();
      name();
    });
    name();
  });
})();
