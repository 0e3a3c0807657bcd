// What starts a program and keeps it going: its globals, its own text as a script or a module, its timers. The host calls `ours` by turns.

import * as std from "qjs:std";
import * as os from "qjs:os";

const waiting = new Map(); // timers to come, by number: when they are due, in milliseconds, and what they do
let numbered = 0, given = {}, done = false;

const fail = error => {
    write(std.err, `${error instanceof Error ? inspect(error) : `Uncaught ${inspect(error)}`}\n`);
    std.exit(1);
};

const milliseconds = () => os.now() / 1000;

const timer = (run, delay, values, again) => {
    if (typeof run !== "function") throw new TypeError('The "callback" argument must be of type function');
    const wait = delay >= 1 && delay < 2 ** 31 ? Number(delay) : 1;
    waiting.set(++numbered, { due: milliseconds() + wait, wait, run, values, again });
    return numbered;
};

const clear = number => { waiting.delete(number); };
const timers = {
    setTimeout: (run, delay, ...values) => timer(run, delay, values, false),
    setInterval: (run, delay, ...values) => timer(run, delay, values, true),
    clearTimeout: clear,
    clearInterval: clear,
};

// Sloppy where it can be, as Node.js has it: only what is no script (it imports, exports or awaits at its top) is a module.
const start = source => {
    const compiled = options => std.evalScript(source, { compile_only: true, backtrace_barrier: true, ...options });
    let script, module;
    try {
        script = compiled({});
    } catch (error) {
        try {
            module = compiled({ compile_module: true });
        } catch (second) {
            throw /\b(?:import|export|await)\b/.test(source) ? second : error;
        }
        std.evalScript(module, { eval_module: true }).then(() => { done = true; }, fail);
        return;
    }
    std.evalScript(script, { eval_function: true });
    done = true;
};

// The engine seeds its generator by the clock, which is the same in every deterministic run, whatever the seed.
const seeded = seed => {
    let state = [...String(seed)].reduce((sum, digit) => Math.imul(sum ^ digit.charCodeAt(0), 16777619), 2166136261);
    const draw = () => {
        state = (state + 0x9e3779b9) | 0;
        let mixed = Math.imul(state ^ (state >>> 16), 0x21f0aaad);
        mixed = Math.imul(mixed ^ (mixed >>> 15), 0x735a2d97);
        return (mixed ^ (mixed >>> 15)) >>> 0;
    };
    return { random: () => ((draw() >>> 5) * 2 ** 26 + (draw() >>> 6)) / 2 ** 53 }.random;
};

// The engine looks for rejections that nobody handles when it waits for something and there is nothing else to do. So there is always
// something to wait for: a timer of its own, which has long been due when the program arrives.
const something = () => new Promise(resolve => os.setTimeout(resolve, 0));
let armed = something(), intact = true;

const ours = {
    /** Start a program. What it does at once is done when this returns. */
    begin(text) {
        given = JSON.parse(text);
        for (const [name, value] of Object.entries(given.env)) std.setenv(name, value);
        if (given.seed !== null) Math.random = seeded(given.seed);
        globalThis.scriptArgs = [given.path, ...given.arguments];
        try {
            os.chdir(given.cwd);
            start(given.source);
        } catch (error) {
            fail(error);
        }
    },
    /** A promise that is kept after so many rounds of all that promises have to do. */
    async rounds(count) {
        intact = false; // the engine looks at its timer meanwhile
        while (count-- > 0) await undefined;
    },
    /** A promise to wait for while the engine looks for unhandled rejections. */
    checked() {
        const promise = intact ? armed : something();
        armed = something();
        intact = true;
        return promise;
    },
    /** Wait for the next timer and do it; false when there is none left. */
    turn() {
        let next, due = Infinity;
        for (const [number, each] of waiting) if (each.due < due) [next, due] = [number, each.due];
        if (next === undefined) return false;
        const each = waiting.get(next), wait = due - milliseconds();
        if (wait > 0) os.sleep(Math.ceil(wait));
        if (each.again) each.due = milliseconds() + each.wait;
        else waiting.delete(next);
        try {
            each.run(...each.values);
        } catch (error) {
            fail(error);
        }
        return true;
    },
    /** The end, when there is nothing left to do. */
    end() {
        if (!done) write(std.err, "Warning: Detected unsettled top-level await\n");
        std.exit(done ? 0 : 13);
    },
};

for (const name of ["execArgv", "argv0"]) delete globalThis[name];
for (const file of [std.out, std.err]) {
    for (const name of ["puts", "printf", "putByte", "write"]) {
        const method = Object.getPrototypeOf(file)[name];
        file[name] = function (...values) {
            const result = method.apply(this, values);
            this.flush();
            return result;
        };
    }
}
const sleepAsync = delay => new Promise(resolve => timers.setTimeout(resolve, delay));
const globals = { console, print: console.log, ...timers, std, os: { ...os, ...timers, sleepAsync }, [Symbol.for("agent-sandbox")]: ours };
for (const name of Reflect.ownKeys(globals)) {
    Object.defineProperty(globalThis, name, { value: globals[name], writable: true, configurable: true });
}
