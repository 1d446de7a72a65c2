#!/usr/bin/env python3
"""The tables of the posts this project began with: varve, qemu-storage-daemon and raw, side by side.

usage: table.py VARVE [--dir DIR] [--rows RE] [--servers qemu,varve,ack,flush] [--ios N] [--size BYTES] [--repeat N] [--json OUT]
A server exports {img} read-write on a unix socket over NBD; fio's nbd engine is the client of all.
Rows "raw" and "1T,raw" are the same export over a raw file: what the other rows are held against,
per server. Images are made by qemu-img, so that all servers open the same bytes. Servers alternate;
with --repeat medians and ratios are printed last. QEMU_CHROOT names a tree with another QEMU.
Whole table at the default size: over an hour; --size 1073741824 --ios 60000 has the same shape in
minutes.
"""
import argparse, json, os, re, shutil, signal, subprocess, sys, tempfile, time

FSYNC = int(os.environ.get("BENCH_FSYNC", 0))       # a flush every so many writes
CHROOT = os.environ.get("QEMU_CHROOT", "")          # e.g. a trixie tree with QEMU 10
def q(tool): return ([ "chroot", CHROOT ] if CHROOT else []) + [tool]
def run(cmd, **kw): return subprocess.run(cmd, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kw).stdout

def qsd_cmd(img, sock, cache):
    opts = {"driver": "qcow2", "node-name": "top", "discard": "unmap",
            "file": {"driver": "file", "filename": img, "cache": {"direct": True, "no-flush": False}, "aio": "io_uring"}}
    if cache: opts["l2-cache-size"] = cache; opts["cache-size"] = cache + (4 << 20)
    if opts["driver"] == "qcow2" and open(img, "rb").read(4) != b"QFI\xfb": opts = {"driver": "raw", "node-name": "top", "file": opts["file"]}
    return q("qemu-storage-daemon") + ["--object", "iothread,id=io0", "--blockdev", json.dumps(opts),
        "--nbd-server", f"addr.type=unix,addr.path={sock}",
        "--export", "type=nbd,id=e,node-name=top,name=,writable=on"]

def varve_cmd(img, sock, cache, *options):
    return [VARVE, "serve", img, "--export", "nbd,unix=" + sock, *options] + (["--cache-size", str(cache)] if cache else [])
def durable(mode): return lambda *a: varve_cmd(*a, "--durability", mode)

SERVERS = {"qemu": qsd_cmd, "varve": varve_cmd, "ack": durable("ack"), "flush": durable("flush")}

def fio(sock, rw, size, ios, depth=32):
    out = run(["fio", "--name=t", *([f"--fsync={FSYNC}"] if FSYNC and "write" in rw else []), "--ioengine=nbd", f"--uri=nbd+unix:///?socket={sock}", f"--rw={rw}", "--bs=4k",
               f"--iodepth={depth}", f"--size={size}", f"--io_size={ios*4096}", "--randseed=7", "--runtime=30",
               "--group_reporting", "--output-format=json"])
    j = json.loads(out[out.index("{"):])["jobs"][0]
    k = "read" if "read" in rw else "write"
    return j[k]["iops"], j[k]["clat_ns"]["percentile"]["99.000000"] / 1e3

GB = 1 << 30
def create(path, size, opts="", backing=None, fmt="qcow2"):
    cmd = q("qemu-img") + ["create", "-q", "-f", fmt]
    if opts: cmd += ["-o", opts]
    if backing: cmd += ["-b", backing, "-F", "qcow2"]
    run(cmd + [path, str(size)])

def fill(img, size):
    """real data over the whole image, so that copy-on-write has something to read"""
    run(q("qemu-img") + ["bench", "-w", "-c", str(size // (1 << 20)), "-s", str(1 << 20),
        "-d", "8", "-f", "qcow2", "-t", "none", "--pattern=90", img])

def rows(d, S):
    """(name, builder -> image path, size, [(rw)], cache)"""
    P = "preallocation=metadata"
    def base(name, o):
        def b():
            p = f"{d}/{name}.qcow2"; create(p, S, o); fill(p, S); return p
        return b
    def clone(name, bo, o):
        def b():
            p = f"{d}/{name}-base.qcow2"; create(p, S, bo); fill(p, S)
            c = f"{d}/{name}-clone.qcow2"; create(c, S, o, backing=p); return c
        return b
    T = 1 << 40
    def big(name, o):
        def b():
            p = f"{d}/{name}.qcow2"; create(p, T, o); return p
        return b
    def bigsnap(name, bo, o):
        def b():
            p = f"{d}/{name}-b.qcow2"; create(p, T, bo); c = f"{d}/{name}-s.qcow2"; create(c, T, o, backing=p); return c
        return b
    def rawf(n, size):
        def b():
            p = f"{d}/{n}.raw"
            with open(p, "wb") as f: f.truncate(size)
            if size <= S:
                run(["fio","--name=f",f"--filename={p}","--rw=write","--bs=1m",f"--size={size}","--direct=1","--ioengine=libaio","--iodepth=8"])
            return p
        return b
    def internal():
        p = f"{d}/internal.qcow2"; create(p, S, P); fill(p, S); run(q("qemu-img") + ["snapshot", "-c", "s1", p]); return p
    RW = ["randwrite", "randread"]
    yield "raw", rawf("raw", S), S, RW, None
    yield "base,64k,ext=off,prealloc", base("b1", f"cluster_size=64k,{P}"), S, RW, None
    yield "base,64k,ext=on,prealloc", base("b2", f"cluster_size=64k,extended_l2=on,{P}"), S, RW, None
    yield "base,128k,ext=on,prealloc", base("b3", f"cluster_size=128k,extended_l2=on,{P}"), S, RW, None
    yield "clone,64k,ext=off", clone("c0", f"cluster_size=64k,{P}", "cluster_size=64k"), S, RW, None
    yield "clone,64k,ext=on", clone("c0e", f"cluster_size=64k,{P}", "cluster_size=64k,extended_l2=on"), S, RW, None
    yield "clone,64k,ext=on,prealloc", clone("c1", f"cluster_size=64k,{P}", f"cluster_size=64k,extended_l2=on,{P}"), S, RW, None
    yield "clone,128k,ext=on,prealloc", clone("c2", f"cluster_size=64k,{P}", f"cluster_size=128k,extended_l2=on,{P}"), S, RW, None
    yield "internal-snapshot,64k", internal, S, RW, None
    yield "1T,raw", rawf("traw", T), T, RW, None
    yield "1T,64k,cache=1G", big("t1", f"cluster_size=64k,{P}"), T, RW, 1 << 30
    yield "1T,64k,cache=32M", big("t1b", f"cluster_size=64k,{P}"), T, RW, 32 << 20
    yield "1T,64k+snap128k-sub,cache=1G", bigsnap("t2", f"cluster_size=64k,{P}", f"cluster_size=128k,extended_l2=on,{P}"), T, RW, 1 << 30
    yield "1T,1M,cache=32M", big("t3", f"cluster_size=1M,{P}"), T, RW, 32 << 20
    yield "1T,1M+snap128k-sub,cache=32M", bigsnap("t4", f"cluster_size=1M,{P}", f"cluster_size=128k,extended_l2=on,{P}"), T, RW, 32 << 20
    yield "1T,1M+snap128k-sub,cache=1G", bigsnap("t5", f"cluster_size=1M,{P}", f"cluster_size=128k,extended_l2=on,{P}"), T, RW, 1 << 30
    yield "1T,1M+snap1M-sub,cache=32M", bigsnap("t6", f"cluster_size=1M,{P}", f"cluster_size=1M,extended_l2=on,{P}"), T, RW, 32 << 20
    yield "1T,1M+snap1M-sub,cache=1G", bigsnap("t7", f"cluster_size=1M,{P}", f"cluster_size=1M,extended_l2=on,{P}"), T, RW, 1 << 30
    yield "1T,1M-sub,cache=32M", big("t8", f"cluster_size=1M,extended_l2=on,{P}"), T, RW, 32 << 20
    yield "1T,1M-sub,cache=1G", big("t9", f"cluster_size=1M,extended_l2=on,{P}"), T, RW, 1 << 30

def measure(A, name, img, size, rw, server, cache):
    sock = f"{A.dir}/s.sock"
    if os.path.exists(sock): os.unlink(sock)
    p = subprocess.Popen(SERVERS[server](img, sock, cache), stdout=open(f"{A.dir}/log", "w"), stderr=subprocess.STDOUT)
    try:
        for _ in range(200):
            if os.path.exists(sock) or p.poll() is not None: break
            time.sleep(.05)
        time.sleep(.2)
        iops, p99 = fio(sock, rw, size, A.ios)
        t = open(f"/proc/{p.pid}/stat").read().rsplit(")", 1)[1].split(); cpu = (int(t[11]) + int(t[12])) / os.sysconf("SC_CLK_TCK")
        rss = int(re.search(r"VmHWM:\s+(\d+)", open(f"/proc/{p.pid}/status").read())[1]) // 1024
    except Exception as e:
        print(name, rw, server, "FAILED", e, open(f"{A.dir}/log").read()[-500:]); return None
    finally:
        p.send_signal(signal.SIGTERM); p.wait()
    alloc = sum(os.stat(f"{A.dir}/{f}").st_blocks for f in os.listdir(A.dir)) // 2048
    r = dict(row=name, rw=rw, server=server, iops=round(iops), p99us=round(p99), cpu_us=round(cpu * 1e6 / A.ios, 1), cpu_s=cpu, rss_mb=rss, alloc_mb=alloc)
    print(f"{name:34s} {rw:10s} {server:6s} {iops:9.0f} iops  p99 {p99:8.0f} us  cpu {r['cpu_us']:6.1f} us/req  rss {rss:5d} MB  disk {alloc} MB", flush=True)
    return r

def main():
    global VARVE
    a = argparse.ArgumentParser(); a.add_argument("varve"); a.add_argument("--dir", default="/var/tmp/varve-bench"); a.add_argument("--rows", default=".")
    a.add_argument("--servers", default="qemu,varve"); a.add_argument("--ios", type=int, default=100000); a.add_argument("--repeat", type=int, default=1)
    a.add_argument("--size", type=int, default=8*GB); a.add_argument("--json")
    A = a.parse_args(); res = []; VARVE = os.path.abspath(A.varve)
    for name, build, size, rws, cache in rows(A.dir, A.size):
        if not re.search(A.rows, name): continue
        for n in range(A.repeat):
            fresh = None
            for rw in ("randread", "randwrite"):              # reads leave the image as it was: one build serves all servers
                for s in A.servers.split(","):
                    if fresh is None or rw == "randwrite":
                        shutil.rmtree(A.dir, ignore_errors=True); os.makedirs(A.dir); fresh = build()
                    r = measure(A, name, fresh, size, rw, s, cache)
                    if r: res.append(r)
    if A.repeat > 1:
        med = lambda v: sorted(v)[len(v) // 2]
        for k in dict.fromkeys((r["row"], r["rw"], r["server"]) for r in res):
            v = [r for r in res if (r["row"], r["rw"], r["server"]) == k]
            print(f"median {k[0]:34s} {k[1]:10s} {k[2]:6s} {med([r['iops'] for r in v]):9d} iops  cpu {med([r['cpu_us'] for r in v]):6.1f} us/req  rss {med([r['rss_mb'] for r in v]):5d} MB")
        pairs = list(dict.fromkeys((r["row"], r["rw"]) for r in res))
        for row, rw in pairs:
            m = {srv: (med([r["iops"] for r in res if (r["row"], r["rw"], r["server"]) == (row, rw, srv)] or [0]),
                       med([r["cpu_us"] for r in res if (r["row"], r["rw"], r["server"]) == (row, rw, srv)] or [0])) for srv in A.servers.split(",")}
            if m.get("flush", [0])[0] and m.get("ack", [0])[0]:
                print(f"ratio  {row:34s} {rw:10s} ack/flush: {m['ack'][0] / m['flush'][0]:.2f} of its requests a second")
            if "qemu" in m and "varve" in m and m["qemu"][0] and m["qemu"][1]:
                print(f"ratio  {row:34s} {rw:10s} varve/qemu: {m['varve'][0] / m['qemu'][0]:.2f} of its requests a second at {m['varve'][1] / m['qemu'][1]:.2f} of its CPU a request")
    if A.json: json.dump(res, open(A.json, "w"), indent=1)
if __name__ == "__main__": main()
