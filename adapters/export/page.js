// What a page can do beyond being read: zoom, details under the pointer, filters, and a state that an address can carry:
// #request=ID selects a request; &from=MS&to=MS shows a part of the time. Nothing is fetched, nothing is stored.
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const timeline = $(".timeline");
  const rows = $(".rows");
  const tip = $("#tip");
  const MAX_ZOOM = 5000;

  // --- details ------------------------------------------------------------------------------
  // The browser's own tooltips show the same without scripts, but late and unformatted.
  for (const title of $$(".rows title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const showTip = (event) => {
    const text = event.target.dataset && event.target.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 14 + box.width > innerWidth;
    const below = event.clientY + 18 + box.height > innerHeight;
    tip.style.left = `${Math.max(4, right ? event.clientX - box.width - 10 : event.clientX + 14)}px`;
    tip.style.top = `${Math.max(4, below ? event.clientY - box.height - 10 : event.clientY + 18)}px`;
  };

  // --- zoom ---------------------------------------------------------------------------------
  const first = timeline ? Number(timeline.dataset.firstMs) : 0;
  const length = timeline ? Number(timeline.dataset.lengthMs) : 1;
  let zoom = 1;
  const labelWidth = () => $(".axis .label").getBoundingClientRect().width;
  const chartWidth = () => timeline.clientWidth - labelWidth();
  const visible = () => {
    const width = chartWidth() * zoom;
    const from = first + (timeline.scrollLeft / width) * length;
    return [from, from + (chartWidth() / width) * length];
  };
  const drawTicks = () => {
    const ticks = $(".ticks");
    const [from, to] = visible();
    const most = Math.min(10, Math.max(2, Math.floor(chartWidth() / 95)));
    const base = 10 ** Math.floor(Math.log10((to - from) / most));
    const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => (to - from) / size <= most);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    ticks.replaceChildren();
    for (let at = Math.max(Math.ceil((from - (to - from)) / step), Math.ceil(first / step)) * step; at <= Math.min(to + (to - from), first + length); at += step) {
      const x = `${((at - first) / length) * 100}%`;
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of [["x1", x], ["x2", x], ["y1", 0], ["y2", 20]]) line.setAttribute(name, value);
      const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      const atEnd = zoom === 1 && (1 - (at - first) / length) * chartWidth() < 80;
      for (const [name, value] of [["x", x], ["y", 13], ["dx", atEnd ? -4 : 4], ["text-anchor", atEnd ? "end" : "start"]]) text.setAttribute(name, value);
      text.textContent = at.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      ticks.append(line, text);
    }
    $("#range").textContent = `${from.toLocaleString("en-US", { maximumFractionDigits: 3 })} – ${to.toLocaleString("en-US", { maximumFractionDigits: 3 })} ms`;
  };
  const setZoom = (wanted, anchor = 0.5) => {
    const [from, to] = visible();
    const held = from + (to - from) * anchor;
    zoom = Math.min(MAX_ZOOM, Math.max(1, wanted));
    rows.style.setProperty("--zoom", zoom);
    const width = chartWidth() * zoom;
    timeline.scrollLeft = ((held - first) / length) * width - anchor * chartWidth();
    drawTicks();
    filter();
  };
  const show = (from, to) => {
    zoom = Math.min(MAX_ZOOM, Math.max(1, length / Math.max(1e-6, to - from)));
    rows.style.setProperty("--zoom", zoom);
    timeline.scrollLeft = ((from - first) / length) * chartWidth() * zoom;
    drawTicks();
    filter();
  };

  // --- the address --------------------------------------------------------------------------
  const parts = () => new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
  const applyAddress = () => {
    const wanted = parts();
    const request = wanted.get("request");
    for (const element of $$(".selected")) element.classList.remove("selected");
    if (request !== null) {
      const found = $$("[data-request]").filter((element) => element.dataset.request === request);
      for (const element of found) {
        element.classList.add("selected");
        element.hidden = false;
        if (element.tagName === "DETAILS") element.open = true;
      }
      const row = found.find((element) => element.classList.contains("row"));
      if (row && timeline) timeline.scrollTop = row.offsetTop - timeline.clientHeight / 2;
      const story = found.find((element) => element.tagName === "DETAILS");
      if (story) story.scrollIntoView({ block: "start" });
    }
    if (timeline && wanted.has("from") && wanted.has("to")) show(Number(wanted.get("from")), Number(wanted.get("to")));
  };

  // --- filters ------------------------------------------------------------------------------
  const filter = () => {
    const text = $("#filter").value.trim().toLowerCase();
    const [onlyTrouble, onlyPreempted, onlyVisible] = ["trouble", "preempted", "visible"].map((name) => $(`#only-${name}`).checked);
    const [from, to] = visible();
    let count = 0;
    for (const element of $$(".life, .life-story")) {
      const shown = element.dataset.request.toLowerCase().includes(text)
        && (!onlyTrouble || element.classList.contains("trouble"))
        && (!onlyPreempted || element.classList.contains("preempted"))
        && (!onlyVisible || (Number(element.dataset.fromMs) <= to && Number(element.dataset.toMs) >= from));
      element.hidden = !shown;
      count += shown && element.classList.contains("row");
    }
    $("#shown").textContent = `${count} shown`;
  };

  if (timeline) {
    document.addEventListener("pointermove", showTip);
    document.addEventListener("scroll", () => { tip.hidden = true; }, true);
    $(".controls").hidden = false;
    $("#closer").addEventListener("click", () => setZoom(zoom * 2));
    $("#farther").addEventListener("click", () => setZoom(zoom / 2));
    $("#whole").addEventListener("click", () => setZoom(1));
    for (const id of ["#filter", "#only-trouble", "#only-preempted", "#only-visible"]) $(id).addEventListener("input", filter);
    timeline.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const anchor = (event.clientX - timeline.getBoundingClientRect().left - labelWidth()) / chartWidth();
      setZoom(zoom * Math.exp(-event.deltaY / 300), Math.min(1, Math.max(0, anchor)));
    }, { passive: false });
    timeline.addEventListener("dblclick", (event) => {
      const anchor = (event.clientX - timeline.getBoundingClientRect().left - labelWidth()) / chartWidth();
      if (anchor >= 0) setZoom(zoom * 4, anchor);
    });
    timeline.addEventListener("scroll", () => {
      drawTicks();
      if ($("#only-visible").checked) filter();
    });
    addEventListener("resize", drawTicks);
    filter();
    drawTicks();
  }
  addEventListener("hashchange", applyAddress);
  applyAddress();
  document.documentElement.dataset.ready = "true";
})();
