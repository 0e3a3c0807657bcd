// How a value looks when it is printed: as Node.js shows it, for what programs commonly print. Never throws for a value, however odd.

const WIDTH = 80, LEVELS = 2, ON_ONE_LINE = 3, ITEMS = 100, CHARACTERS = 10000, COLUMNS = 15;
const PLAIN_KEY = /^[A-Za-z_]\w*$/;
const UNPRINTABLE = /[\x00-\x1f\x7f-\x9f\\]/g;
const SHORT = { "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", "\\": "\\\\" };
const TypedArray = Object.getPrototypeOf(Uint8Array);
const BOXES = [[Number, "Number"], [String, "String"], [Boolean, "Boolean"], [Symbol, "Symbol"], [BigInt, "BigInt"]];

const quoted = text => {
    const mark = !text.includes("'") ? "'" : !text.includes('"') ? '"' : !/[`$]/.test(text) ? "`" : "'";
    const escaped = text.replace(UNPRINTABLE, c => SHORT[c] ?? "\\x" + c.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0"));
    return mark + (mark === "'" ? escaped.replaceAll("'", "\\'") : escaped) + mark;
};

const primitive = value => {
    switch (typeof value) {
        case "string":
            if (value.length <= CHARACTERS) return quoted(value);
            return `${quoted(value.slice(0, CHARACTERS))}... ${value.length - CHARACTERS} more characters`;
        case "number": return Object.is(value, -0) ? "-0" : String(value);
        case "bigint": return `${value}n`;
        default: return String(value);
    }
};

const nameOf = object => {
    for (let proto = object; proto !== null; proto = Object.getPrototypeOf(proto)) {
        const made = Object.getOwnPropertyDescriptor(proto, "constructor")?.value;
        if (typeof made === "function" && made.name !== "" && object instanceof made) return made.name;
    }
    return null;
};

const prefix = (object, usual, size) => {
    const name = nameOf(object);
    const listed = Object.prototype.propertyIsEnumerable.call(object, Symbol.toStringTag); // and so shown anyway
    const tag = typeof object[Symbol.toStringTag] === "string" && !listed ? object[Symbol.toStringTag] : "";
    const counted = size === undefined ? "" : `(${size})`;
    const shown = name === null ? `[${usual}${counted}: null prototype]` : name + counted;
    return tag !== "" && tag !== name ? `${shown} [${tag}] ` : shown === usual ? "" : `${shown} `;
};

const functionText = value => {
    const text = Function.prototype.toString.call(value);
    const called = value.name === "" ? "(anonymous)" : value.name;
    if (text.startsWith("class")) {
        const above = Object.getPrototypeOf(value)?.name;
        return `[class ${called}${above ? ` extends ${above}` : ""}]`;
    }
    const kind = Object.getPrototypeOf(value)?.[Symbol.toStringTag] ?? "Function";
    return value.name === "" ? `[${kind} (anonymous)]` : `[${kind}: ${called}]`;
};

const errorText = error => {
    const { name, message, stack } = error;
    const first = message === "" || message === undefined ? String(name) : `${name}: ${message}`;
    return typeof stack === "string" && stack !== "" ? `${first}\n${stack.trimEnd()}` : `[${first}]`;
};

let deepest = 0; // how far in the object is that was begun last

/** A value as text. `seen` are the objects around it; those that contain themselves get a number in `circles`. */
const inspect = (value, levels = LEVELS, indent = 0, seen = [], circles = new Map()) => {
    if (value === null || (typeof value !== "object" && typeof value !== "function")) return primitive(value);
    if (seen.includes(value)) {
        if (!circles.has(value)) circles.set(value, circles.size + 1);
        return `[Circular *${circles.get(value)}]`;
    }
    let text;
    try {
        text = objectText(value, levels, indent, [...seen, value], circles);
    } catch (error) {
        if (error instanceof RangeError || error instanceof InternalError) throw error;
        text = "[Object that cannot be read]";
    }
    return circles.has(value) ? `<ref *${circles.get(value)}> ${text}` : text;
};

const objectText = (value, levels, indent, seen, circles) => {
    const inner = (item, more = 2) => inspect(item, levels - 1, indent + more, seen, circles);
    const keys = Reflect.ownKeys(value).filter(key => Object.prototype.propertyIsEnumerable.call(value, key));
    const rest = () => keys.map(key => property(value, key, inner));
    const parts = value instanceof Map || value instanceof Set ? value.size : Array.isArray(value) ? value.length : 0;
    const deep = name => levels < 0 && parts + keys.length > 0 ? `[${name}]` : null;
    if (levels >= 0 && parts + keys.length > 0) deepest = seen.length;
    const braces = (open, items, close = "}") => oneOrMoreLines(open, items, close, indent, seen.length);
    const followed = (text, items) => items.length === 0 ? text : braces(`${text} {`, items);
    if (Array.isArray(value) || value instanceof TypedArray) {
        const name = prefix(value, "Array", Array.isArray(value) && value.constructor === Array ? undefined : value.length);
        const extra = keys.filter(key => typeof key === "symbol" || !/^\d+$/.test(key)).map(key => property(value, key, inner));
        return deep(nameOf(value) ?? "Array") ?? arrayText(name, listed(value, inner), extra, value, indent, seen.length);
    }
    if (typeof value === "function") return followed(functionText(value), levels < 0 ? [] : rest());
    if (value instanceof Error) {
        const described = keys.filter(key => !["stack", "message", "name"].includes(key)).map(key => property(value, key, inner));
        if (Object.hasOwn(value, "cause") && !keys.includes("cause")) described.push(`[cause]: ${inner(value.cause)}`);
        if (Array.isArray(value.errors) && !keys.includes("errors")) described.push(`[errors]: ${inner(value.errors)}`);
        const text = errorText(value).replaceAll("\n", `\n${" ".repeat(indent)}`);
        return described.length === 0 || levels < 0 ? text : lines(`${text} {`, described, "}", indent);
    }
    if (value instanceof RegExp) return followed(RegExp.prototype.toString.call(value), rest());
    if (value instanceof Date) return followed(isNaN(value) ? "Invalid Date" : value.toISOString(), rest());
    for (const [box, name] of BOXES) {
        if (!(value instanceof box)) continue;
        const extra = name === "String" ? keys.filter(key => !/^\d+$/.test(String(key))) : keys;
        return followed(`[${name}: ${primitive(value.valueOf())}]`, extra.map(key => property(value, key, inner)));
    }
    if (value instanceof Map) {
        const items = () => [...value].map(([key, item]) => `${inner(key)} => ${inner(item)}`);
        return deep("Map") ?? braces(`${prefix(value, "", value.size)}{`, [...items(), ...rest()]);
    }
    if (value instanceof Set) {
        const items = () => [...value].map(item => inner(item));
        return deep("Set") ?? braces(`${prefix(value, "", value.size)}{`, [...items(), ...rest()]);
    }
    if (value instanceof ArrayBuffer) {
        const bytes = [...new Uint8Array(value, 0, Math.min(value.byteLength, 50))].map(byte => byte.toString(16).padStart(2, "0"));
        const more = value.byteLength > 50 ? ` ... ${value.byteLength - 50} more bytes` : "";
        return braces("ArrayBuffer {", [`[Uint8Contents]: <${bytes.join(" ")}${more}>`, `byteLength: ${value.byteLength}`]);
    }
    if (value instanceof WeakMap || value instanceof WeakSet) return `${nameOf(value)} { <items unknown> }`;
    if (value instanceof Promise) return braces(`${prefix(value, "")}{`, ["<state unknown>", ...rest()]);
    if (Object.prototype.toString.call(value) === "[object Arguments]") return braces("[Arguments] {", rest());
    return deep(nameOf(value) ?? "Object: null prototype") ?? braces(`${prefix(value, "Object")}{`, rest());
};

const property = (object, key, inner) => {
    const named = key === "__proto__" ? "['__proto__']" : quoted(String(key));
    const shown = typeof key === "symbol" ? `[${String(key)}]` : PLAIN_KEY.test(key) && key !== "__proto__" ? key : named;
    const { get, set, value } = Object.getOwnPropertyDescriptor(object, key) ?? { value: undefined };
    if (get !== undefined) return `${shown}: [${set === undefined ? "Getter" : "Getter/Setter"}]`;
    return set !== undefined ? `${shown}: [Setter]` : `${shown}: ${inner(value)}`;
};

/** The items of an array, as many as are shown; a hole takes no longer for being large. */
const listed = (array, inner) => {
    const items = [];
    let at = 0;
    while (at < array.length && items.length < ITEMS) {
        if (at in array) {
            items.push(inner(array[at++]));
            continue;
        }
        const next = Object.keys(array).map(Number).find(key => key > at) ?? array.length;
        items.push(`<${next - at} empty item${next - at > 1 ? "s" : ""}>`);
        at = next;
    }
    const left = array.length - at;
    return left > 0 ? [...items, `... ${left} more item${left > 1 ? "s" : ""}`] : items;
};

const arrayText = (name, items, extra, array, indent, depth) => {
    const rows = items.length > 6 && extra.length === 0 ? inColumns(items, array, indent) : items;
    const all = [...rows, ...extra];
    if (rows.length !== items.length) return lines(`${name}[`, all, "]", indent);
    return oneOrMoreLines(`${name}[`, all, "]", indent, depth);
};

/** Many short items of an array, side by side: about as many columns as make the block two and a half times as wide as it is high. */
const inColumns = (items, array, indent) => {
    const more = array.length > ITEMS && items.length > ITEMS ? 1 : 0;
    const count = items.length - more;
    const widths = items.slice(0, count).map(item => item.length + 2);
    const widest = Math.max(...widths), total = widths.reduce((sum, width) => sum + width, 0);
    if (widest * 3 + indent >= WIDTH || !(total / widest > 5 || widest <= 8)) return items;
    if (items.some(item => item.includes("\n"))) return items;
    const bias = Math.max(widest - Math.sqrt(widest - total / items.length) - 3, 1);
    const wished = Math.round(Math.sqrt(2.5 * bias * count) / bias);
    const columns = Math.min(wished, Math.floor((WIDTH - indent) / widest), ON_ONE_LINE * 4, COLUMNS);
    if (columns <= 1) return items;
    const wide = Array.from({ length: columns }, (_, column) => Math.max(...widths.filter((_, at) => at % columns === column)));
    const toTheRight = Array.from({ length: count }, (_, at) => typeof array[at]).every(type => type === "number" || type === "bigint");
    const rows = [];
    for (let first = 0; first < count; first += columns) {
        const row = items.slice(first, Math.min(first + columns, count));
        rows.push(row.map((item, at) => {
            const last = at === row.length - 1;
            if (toTheRight) return last ? item.padStart(wide[at] - 2) : `${item}, `.padStart(wide[at]);
            return last ? item : `${item}, `.padEnd(wide[at]);
        }).join(""));
    }
    return more ? [...rows, items[count]] : rows;
};

const lines = (open, items, close, indent) => {
    const margin = `\n${" ".repeat(indent)}`;
    return `${open}${margin}  ${items.join(`,${margin}  `)}${margin}${close}`;
};

/** On one line if it fits, and holds no more than three levels as far as its last part shows. */
const oneOrMoreLines = (open, items, close, indent, depth) => {
    if (items.length === 0) return open + close;
    const length = items.reduce((sum, item) => sum + item.length + 2, indent + open.length + 10);
    const flat = deepest - depth < ON_ONE_LINE && length <= WIDTH && !items.some(item => item.includes("\n"));
    return flat ? `${open} ${items.join(", ")} ${close}` : lines(open, items, close, indent);
};
