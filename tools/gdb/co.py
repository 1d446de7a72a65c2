"""gdb commands for coroutines, on a live process or a core file.

    (gdb) source tools/gdb/co.py
    (gdb) co                list the suspended coroutines, with the innermost frames of each
    (gdb) co bt ADDRESS     the whole stack of one
    (gdb) co all            the whole stack of each

The list co_slabs (src/rt/co.c) names every stack. A suspended coroutine has left its registers
where co_switch() put them; an unwinder shows gdb those in place of the selected thread's, so
nothing is written to the process.
"""

import gdb
from gdb.unwinder import Unwinder, register_unwinder

# What co_switch() leaves at the saved stack pointer: (register, offset), and the whole length.
LAYOUTS = {
    "x86-64": ([("r15", 0), ("r14", 8), ("r13", 16), ("r12", 24), ("rbx", 32), ("rbp", 40), ("rip", 48)],
               56, "rsp", "rip"),
    "aarch64": ([("x%d" % r, 8 * (r - 19)) for r in range(19, 31)] + [("pc", 88)], 160, "sp", "pc"),
}


class FrameId:
    def __init__(self, sp, pc):
        self.sp = sp
        self.pc = pc


class CoUnwinder(Unwinder):
    """While `sp` is set, the frame below the selected thread's innermost one is a coroutine's."""

    def __init__(self):
        super().__init__("varve-coroutine")
        self.sp = None

    def __call__(self, pending_frame):
        if self.sp is None or pending_frame.level() != 0:
            return None
        arch = pending_frame.architecture().name()
        layout = next((v for k, v in LAYOUTS.items() if k in arch), None)
        if layout is None:
            return None
        registers, length, sp_name, pc_name = layout
        word = gdb.lookup_type("unsigned long")
        info = pending_frame.create_unwind_info(
            FrameId(pending_frame.read_register(sp_name), pending_frame.read_register(pc_name)))
        for name, offset in registers:
            value = gdb.Value(self.sp + offset).cast(word.pointer()).dereference()
            like = pending_frame.read_register(name).type
            info.add_saved_register(name, value.cast(like) if like.sizeof == 8 else value)
        info.add_saved_register(sp_name, gdb.Value(self.sp + length).cast(word))
        return info


unwinder = CoUnwinder()
register_unwinder(None, unwinder, replace=True)


def coroutines():
    """All coroutines that are in use and not running, as values of type struct co *."""
    # "all" is the link of struct co_slab in the list.
    head = gdb.parse_and_eval("&co_slabs")
    slab_type = gdb.lookup_type("struct co_slab")
    link_offset = next(f.bitpos // 8 for f in slab_type.fields() if f.name == "all")
    node = head["next"]
    while int(node) != int(head):
        slab = gdb.Value(int(node) - link_offset).cast(slab_type.pointer())
        low, high = slab["slots"].type.range()
        for i in range(low, high + 1):
            co = slab["slots"][i]
            if bool(co["used"]) and not bool(co["ended"]) and int(co) not in running():
                yield co
        node = node["next"]


def running():
    """Addresses of the coroutines that threads are in right now."""
    found = set()
    selected = gdb.selected_thread()
    for thread in gdb.selected_inferior().threads():
        thread.switch()
        try:
            found.add(int(gdb.parse_and_eval("'co.c'::current")))
        except gdb.error:
            pass
    if selected:
        selected.switch()
    return found


def stack_of(co):
    """Lines of the backtrace of a suspended coroutine."""
    unwinder.sp = int(co["sp"])
    gdb.invalidate_cached_frames()
    try:
        lines = gdb.execute("backtrace", to_string=True).splitlines()
    except gdb.error as e:
        lines = ["", "(%s)" % e]
    finally:
        unwinder.sp = None
        gdb.invalidate_cached_frames()
    # The first frame is the selected thread's own.
    return lines[1:]


def state_of(co):
    if bool(co["queued"]):
        return "runnable"
    io = co["io"]
    if int(io) != 0:
        return "waits for %s on descriptor %d" % (io["kind"], int(io["fd"]))
    return "sleeps"


class CoCommand(gdb.Command):
    """Show suspended coroutines: co [all | bt ADDRESS]"""

    def __init__(self):
        super().__init__("co", gdb.COMMAND_STACK)

    def invoke(self, arg, from_tty):
        words = arg.split(None, 1)
        if words and words[0] == "bt" and len(words) == 2:
            co_type = gdb.lookup_type("struct co").pointer()
            for line in stack_of(gdb.parse_and_eval(words[1]).cast(co_type)):
                print(line)
            return
        if words and words[0] != "all":
            raise gdb.GdbError("usage: co [all | bt ADDRESS]")
        nr = 0
        for co in coroutines():
            print("coroutine 0x%x: %s" % (int(co), state_of(co)))
            lines = stack_of(co)
            for line in lines if words else lines[:6]:
                print("    " + line)
            nr += 1
        print("%d suspended coroutines" % nr)


CoCommand()
