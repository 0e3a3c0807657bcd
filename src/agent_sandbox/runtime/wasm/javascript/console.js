// The console: formatted as Node.js does, each call written at once. What was printed before a timeout is not lost in a buffer.

let margin = "";
const counts = new Map(), clocks = new Map();

const write = (file, text) => file.puts(text.toWellFormed()); // which writes it out, see below

const plain = value => typeof value === "string" ? value : inspect(value);

const number = (value, read) => {
    if (typeof value === "bigint") return `${value}n`;
    return typeof value === "symbol" || (typeof value === "object" && value !== null) ? "NaN" : primitive(read(value));
};

const BUILT_IN = new Set([Object, Array, Date, RegExp, Error].map(each => each.prototype.toString));

const PLACES = {
    s: value => {
        if (typeof value === "string" || typeof value === "function") return String(value);
        if (typeof value !== "object" || value === null) return primitive(value);
        const own = typeof value.toString === "function" && !BUILT_IN.has(value.toString);
        return own ? String(value) : inspect(value, 0);
    },
    d: value => number(value, Number),
    i: value => number(value, item => parseInt(item, 10)),
    f: value => typeof value === "symbol" ? "NaN" : primitive(parseFloat(value)),
    j: value => { try { return JSON.stringify(value); } catch { return "[Circular]"; } },
    o: value => inspect(value, 4),
    O: value => inspect(value),
    c: () => "",
};

const format = (first, ...rest) => {
    if (typeof first !== "string") return [first, ...rest].map(plain).join(" ");
    if (rest.length === 0) return first;
    let at = 0;
    const text = !first.includes("%") ? first : first.replace(/%([sdifjoOc%])/g, (mark, kind) => {
        if (kind === "%") return "%";
        return at < rest.length ? PLACES[kind](rest[at++]) : mark;
    });
    return [text, ...rest.slice(at).map(plain)].join(" ");
};

const say = (file, values) => {
    const text = values.length === 0 ? "" : format(...values);
    write(file, `${margin === "" ? text : margin + text.replaceAll("\n", `\n${margin}`)}\n`);
};

const table = (rows, wanted) => {
    if (typeof rows !== "object" || rows === null) return format(rows);
    const entries = rows instanceof Map ? [...rows.entries()] : rows instanceof Set ? [...rows.keys()].entries() : Object.entries(rows);
    const heads = new Set(wanted), lines = [];
    let values = false;
    for (const [key, row] of entries) {
        const composed = typeof row === "object" && row !== null;
        if (composed && !wanted) for (const head of Object.keys(row)) heads.add(head);
        if (!composed) values = true;
        lines.push([key, row, composed]);
    }
    const cell = value => inspect(value, 0);
    const all = ["(index)", ...heads, ...(values ? ["Values"] : [])];
    const body = lines.map(([key, row, composed]) => [
        String(key),
        ...[...heads].map(head => composed && Object.hasOwn(row, head) ? cell(row[head]) : ""),
        ...(values ? [composed ? "" : cell(row)] : []),
    ]);
    const widths = all.map((head, at) => Math.max(head.length, ...body.map(row => row[at].length)) + 2);
    const row = cells => `│${cells.map((text, at) => ` ${text}`.padEnd(widths[at])).join("│")}│`;
    const rule = (left, middle, right) => left + widths.map(width => "─".repeat(width)).join(middle) + right;
    return [rule("┌", "┬", "┐"), row(all), rule("├", "┼", "┤"), ...body.map(row), rule("└", "┴", "┘")].join("\n");
};

const passed = label => `${label}: ${(performance.now() - clocks.get(label)).toFixed(3)}ms`;
const log = (...values) => say(std.out, values);
const warn = (...values) => say(std.err, values);

const console = {
    log,
    info: log,
    debug: log,
    error: warn,
    warn,
    trace: (...values) => warn(`Trace: ${format(...values)}\n${new Error().stack.trimEnd().split("\n").slice(1).join("\n")}`),
    assert: (held, first, ...rest) => {
        if (held) return;
        if (typeof first === "string") warn(`Assertion failed: ${first}`, ...rest);
        else if (first === undefined) warn("Assertion failed");
        else warn("Assertion failed:", first, ...rest);
    },
    dir: (value, { depth = LEVELS } = {}) => say(std.out, [inspect(value, depth ?? Infinity)]),
    table: (rows, heads) => say(std.out, [table(rows, heads)]),
    group: (...values) => { if (values.length > 0) log(...values); margin += "  "; },
    groupCollapsed: (...values) => console.group(...values),
    groupEnd: () => { margin = margin.slice(2); },
    count: (label = "default") => { counts.set(label, (counts.get(label) ?? 0) + 1); log(`${label}: ${counts.get(label)}`); },
    countReset: (label = "default") => { counts.delete(label); },
    time: (label = "default") => { clocks.set(label, performance.now()); },
    timeLog: (label = "default", ...values) => { if (clocks.has(label)) log(passed(label), ...values); },
    timeEnd: (label = "default") => { if (clocks.has(label)) log(passed(label)); clocks.delete(label); },
};
