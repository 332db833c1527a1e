"use strict";
// Small helps on every page: commands to copy, forms that are sent when something is chosen.
document.addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Select it and copy";
      }
    });
  }
  for (const chosen of document.querySelectorAll("form.pick select[data-now]")) {
    chosen.addEventListener("change", () => chosen.form.requestSubmit());
  }
});
