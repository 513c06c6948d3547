// Light or dark: the system's choice, unless the switch chose the other one. Runs before the page is first drawn.

import { icon } from "./dom.js";

const THEME = "mlxinfer.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const system = () => (dark.matches ? "dark" : "light");
const shown = () => localStorage.getItem(THEME) ?? system();
const show = () => { document.documentElement.dataset.theme = localStorage.getItem(THEME) ?? ""; };

/** Makes this button the switch. */
export function themeSwitch(button) {
  const draw = () => {
    show();
    const other = shown() === "dark" ? "light" : "dark";
    button.replaceChildren(icon(other));
    button.title = `Switch to ${other}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    const other = shown() === "dark" ? "light" : "dark";
    if (other === system()) localStorage.removeItem(THEME);
    else localStorage.setItem(THEME, other);
    draw();
  });
  dark.addEventListener("change", draw);
  addEventListener("storage", ({ key }) => { if (!key || key === THEME) draw(); });
  draw();
}

show();
