"""Runs in a guest: a client of a disk that moves from server to server. Writes blocks with rising stamps, one request after the
other; when a server ends it repeats what was not answered at whichever of the addresses answers next, as a guest's QEMU does.

  moved.py OPTIONS-JSON      addresses ([[host, port], ...]), size, seed
It ends when /root/moved.stop is there: it has read the whole disk then, and all was as it was answered.
"""
import json, os, random, struct, sys, time
from nbdclient import Nbd, NbdError

OPTIONS = json.loads(sys.argv[1])
BLOCK = 4096
BLOCKS = OPTIONS['size'] // BLOCK
model = [0] * BLOCKS
connections, longest = [], 0


def content(block, stamp):
    return struct.pack('>QQ', block, stamp) * (BLOCK // 16) if stamp else bytes(BLOCK)


def connect():
    while True:
        for address in OPTIONS['addresses']:
            try:
                disk = Nbd(address, timeout=60)
                if disk.size < OPTIONS['size']:
                    raise SystemExit('%s serves %d bytes' % (address, disk.size))
                connections.append(address[0])
                print('at %s' % address[0], flush=True)
                return disk
            except (OSError, EOFError):
                pass
        time.sleep(.1)


def main():
    global longest
    rnd, disk, stamp = random.Random(OPTIONS['seed']), connect(), 0
    while not os.path.exists('/root/moved.stop'):
        stamp += 1
        first = rnd.randrange(BLOCKS - 8)
        blocks = range(first, first + rnd.choice((1, 1, 4, 8)))
        data = b''.join(content(b, stamp) for b in blocks)
        begin = time.monotonic()
        while True:
            try:
                disk.write(first * BLOCK, data)
                if stamp % 10 == 0:
                    disk.flush()
                b = rnd.randrange(BLOCKS)
                known = b not in blocks and disk.read(b * BLOCK, BLOCK)
                break
            except NbdError:    # a server whose disk has not come yet: a guest would stand still
                time.sleep(.05)
            except (OSError, EOFError):
                disk = connect()
        longest = max(longest, time.monotonic() - begin)
        for i in blocks:
            model[i] = stamp
        if known and known != content(b, model[b]):
            raise SystemExit('block %d holds %s, not stamp %d (server %s)' % (b, known[:16].hex(), model[b], connections[-1]))
        time.sleep(.02)
    for b in range(BLOCKS):
        data = disk.read(b * BLOCK, BLOCK)
        if data != content(b, model[b]):
            raise SystemExit('at the end block %d holds %s, not stamp %d' % (b, data[:16].hex(), model[b]))
    print(json.dumps({'writes': stamp, 'connections': connections, 'longest': round(longest, 2)}))


main()
