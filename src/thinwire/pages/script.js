"use strict";
(() => {
  // Every figure: what is pointed at is named, and a name in the legend hides or shows its series.
  const hidden = new Set();
  const store = {
    get(name) { try { return JSON.parse(sessionStorage.getItem(name)); } catch { return null; } },
    set(name, value) { try { sessionStorage.setItem(name, JSON.stringify(value)); } catch { /* a page may be denied it */ } },
  };
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const shape = (tag, values) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
    return node;
  };

  function show(figure, number, name, isShown) {
    for (const group of figure.querySelectorAll("g.series")) {
      if (group.dataset.name === name) group.classList.toggle("off", !isShown);
    }
    for (const button of figure.querySelectorAll(".legend button")) {
      if (button.dataset.name === name) button.setAttribute("aria-pressed", String(isShown));
    }
    hidden[isShown ? "delete" : "add"](`${number}/${name}`);
  }

  function readout(figure, number) {
    const picture = figure.querySelector(":scope > svg");
    const source = figure.querySelector("script");
    if (!picture || !source) return;
    const data = JSON.parse(source.textContent);
    const box = make("div", "readout");
    const here = shape("g", {});
    box.hidden = true;
    box.setAttribute("aria-live", "polite");
    figure.append(box);
    picture.append(here);
    picture.tabIndex = 0;
    let now = null;
    const shownSeries = () => data.series.filter((one) => !hidden.has(`${number}/${one.name}`));
    const clear = () => { box.hidden = true; now = null; here.replaceChildren(); };
    const point = (event) => {
      const frame = picture.getBoundingClientRect();
      const unit = frame.width / picture.viewBox.baseVal.width;
      const x = (event.clientX - frame.left) / unit, y = (event.clientY - frame.top) / unit;
      let best = null, least = Infinity;
      for (const one of shownSeries()) for (const spot of one.points) {
        // Along x counts more: lines are read from left to right.
        const far = 4 * (spot[0] - x) ** 2 + (spot[1] - y) ** 2;
        if (far < least) { least = far; best = spot; }
      }
      if (best) say(best); else clear();
    };
    // Arrow keys go from point to point: along lines from left to right, and from row to row.
    const walk = (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key === "Escape") return clear();
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const axes = data.x ? [0, 1] : [1, 0];
      const spots = shownSeries().flatMap((one) => one.points);
      spots.sort((a, b) => a[axes[0]] - b[axes[0]] || a[axes[1]] - b[axes[1]]);
      const stops = [];
      for (const spot of spots) if (!data.x || !stops.length || spot[0] - stops.at(-1)[0] > 0.6) stops.push(spot);
      if (!stops.length) return;
      // A pointer may have named another point of the same column.
      const at = now && stops.findIndex((spot) => (data.x ? Math.abs(spot[0] - now[0]) <= 0.6 : spot === now));
      const next = now === null || at < 0 ? (step > 0 ? 0 : stops.length - 1) : at + step;
      say(stops[Math.min(stops.length - 1, Math.max(0, next))]);
    };
    const say = (best) => {
      now = best;
      const frame = picture.getBoundingClientRect();
      const unit = frame.width / picture.viewBox.baseVal.width;
      const shown = shownSeries();
      const isColumn = Boolean(data.x);
      const near = [];
      for (const one of shown) for (const spot of one.points) {
        if (spot === best || (isColumn && Math.abs(spot[0] - best[0]) < 0.6)) near.push([one, spot]);
      }
      near.sort((a, b) => a[1][1] - b[1][1]);
      here.replaceChildren(...near.slice(0, 12).map(([, spot]) => shape("circle", { class: "here", cx: spot[0], cy: spot[1], r: 6.5 })));
      const lines = [make("b", "", isColumn ? `${data.x} ${best[2]}` : best[2])];
      for (const [one, spot] of near.slice(0, 12)) {
        const line = make("div");
        const word = spot[4] || one.name;
        line.append(make("i", one.colour, word ? `${word} ` : ""), document.createTextNode(spot[3]));
        lines.push(line);
      }
      box.replaceChildren(...lines);
      box.hidden = false;
      const outer = figure.getBoundingClientRect(), width = box.offsetWidth;
      const left = best[0] * unit + frame.left - outer.left, room = outer.width - width;
      const beside = left + 12 > room ? left - 12 - width : left + 12;
      box.style.left = `${Math.max(0, Math.min(beside, room))}px`;
      box.style.top = `${best[1] * unit + frame.top - outer.top + 10}px`;
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("keydown", walk);
    picture.addEventListener("blur", clear);
    // A finger leaves as soon as it is lifted: then what it touched stays named until another place is touched.
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") clear(); });
    document.addEventListener("pointerdown", (event) => { if (!picture.contains(event.target)) clear(); });
  }

  [...document.querySelectorAll("figure.chart")].forEach((figure, number) => {
    readout(figure, number);
    for (const button of figure.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        show(figure, number, button.dataset.name, button.getAttribute("aria-pressed") !== "true");
      });
    }
    for (const key of store.get(`hidden ${location.pathname}`) || []) {
      const [place, ...name] = key.split("/");
      if (Number(place) === number) show(figure, number, name.join("/"), false);
    }
  });

  // Tables are sorted by the column that is clicked: by the number that a cell begins with, if it does, else by letters.
  const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };
  const number = (text) => {
    const found = text.replace(/,/g, "").match(/^([-+]?[\d.]+)\s*([kMG]?B\b)?/);
    return found ? parseFloat(found[1]) * (units[found[2]] || 1) : NaN;
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.dataset.sort = "";
      head.tabIndex = 0;
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        head.click();
      });
      head.addEventListener("click", () => {
        const isUp = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        const value = (row) => row.cells[column]?.textContent.trim() || "";
        const order = (a, b) => {
          const x = number(value(a)), y = number(value(b));
          if (Number.isNaN(x) && Number.isNaN(y)) return value(a).localeCompare(value(b));
          return Number.isNaN(x) ? 1 : Number.isNaN(y) ? -1 : x - y;
        };
        const rows = [...table.tBodies[0].rows].sort((a, b) => (isUp ? order(a, b) : order(b, a)));
        table.tBodies[0].append(...rows);
      });
    });
  }

  // What is folded is printed, too.
  const unfolded = [];
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details:not([open])")) { one.open = true; unfolded.push(one); }
  });
  addEventListener("afterprint", () => { for (const one of unfolded.splice(0)) one.open = false; });

  // A run that goes on: the page is loaded anew, and the reader stays where he was.
  const seconds = Number(document.body.dataset.refresh);
  const key = `scroll ${location.pathname}`;
  const folded = [...document.querySelectorAll("details")];
  const before = performance.getEntriesByType("navigation")[0]?.type === "reload" && store.get(key);
  if (before) {
    history.scrollRestoration = "manual";
    before.open.forEach((isOpen, place) => { if (folded[place]) folded[place].open = isOpen; });
    scrollTo(0, before.top);
  }
  if (seconds) {
    const again = () => {
      if (document.hidden) { setTimeout(again, 1000); return; }
      store.set(key, { top: scrollY, open: folded.map((one) => one.open) });
      store.set(`hidden ${location.pathname}`, [...hidden]);
      location.reload();
    };
    setTimeout(again, 1000 * seconds);
    const written = document.querySelector("time[data-written]");
    const age = (Date.now() - Date.parse(written.dateTime)) / 1000;
    // What was killed cannot say so.
    if (age > 60 + 3 * seconds) written.after(`: no news for ${Math.round(age / 60)} min; a step takes long, or the run was killed`);
  }
})();
