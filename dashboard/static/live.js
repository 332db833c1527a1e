"use strict";
// Follows runs that are being made: one event of the server, one redrawing of the list.
(() => {
  const make = (tag, words, className) => {
    const node = document.createElement(tag);
    if (words !== undefined) node.textContent = words;
    if (className) node.className = className;
    return node;
  };

  const cell = (words, tag = "td") => make(tag, words);

  function rows(run, shown) {
    const table = make("table");
    const head = table.createTHead().insertRow();
    const bench = run.of === "bench";
    head.append(cell(bench ? "strategy" : "trial", "th"), cell("state", "th"));
    if (bench) for (const one of shown) head.append(cell(one.title, "th"));
    const body = table.createTBody();
    for (const row of run.rows) {
      const line = body.insertRow();
      line.append(make("th", row.name));
      const state = make("td");
      state.append(make("span", row.state, `badge ${row.state}`));
      line.append(state);
      if (bench) for (const one of shown) line.append(cell(row.figures[one.key] || ""));
      if (row.detail && row.state !== "passed") {
        const why = body.insertRow().insertCell();
        why.colSpan = 2 + (bench ? shown.length : 0);
        why.className = "wrap";
        why.append(make("small", row.detail));
      }
    }
    const scroll = make("div", undefined, "scroll");
    scroll.tabIndex = 0;
    scroll.append(table);
    return scroll;
  }

  function card(run, shown) {
    const place = make("section", undefined, "card");
    const title = make("h2", `${run.of}: ${run.title} `);
    if (run.profile) title.append(make("span", `emulated by ${run.profile}`, "badge emulated"));
    place.append(title);
    const inner = run.steps ? run.step / run.steps : 0;
    const bar = make("progress");
    bar.max = Math.max(run.total, 1);
    bar.value = Math.min(run.done + inner, bar.max);
    bar.setAttribute("aria-label", "How far it has come");
    const steps = run.steps ? `, step ${run.step} of ${run.steps}` : "";
    place.append(make("p", `${run.done} of ${run.total} done. Now: ${run.stage}${steps}.`), bar);
    if (run.silent_s) {
      place.append(make("p", `Not heard of for ${run.silent_s} s or more: it was probably killed.`,
        "note bad"));
    }
    place.append(rows(run, shown));
    return place;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const place = document.getElementById("live");
    const state = document.getElementById("live-state");
    const shown = JSON.parse(place.dataset.shown);
    let newest = place.dataset.newest;
    const source = new EventSource("/api/live/stream");
    source.addEventListener("open", () => { state.textContent = "Connected: what is new appears by itself."; });
    source.addEventListener("error", () => { state.textContent = "Not connected; trying again…"; });
    source.addEventListener("live", (event) => {
      const now = JSON.parse(event.data);
      place.replaceChildren(...now.runs.map((run) => card(run, shown)));
      document.getElementById("live-nothing").hidden = now.runs.length > 0;
      if (now.newest && now.newest !== newest) {
        newest = now.newest;
        const link = document.getElementById("live-finished");
        link.href = `/run?run=${encodeURIComponent(newest)}`;
        link.textContent = `Finished: ${now.newest_kind} ${newest}. See what it found.`;
        link.parentElement.hidden = false;
      }
    });
  });
})();
