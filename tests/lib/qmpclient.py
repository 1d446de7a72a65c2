"""A QMP client for tests: works on `varve serve` and on QEMU's programs."""
import json, socket, time


class QmpError(Exception):
    def __init__(self, error):
        super().__init__('%s: %s' % (error['class'], error['desc']))
        self.cls, self.desc = error['class'], error['desc']


class Qmp:
    """with Qmp(path) as q: q.execute('block_resize', {'node-name': 'x', 'size': 1}) or q.execute('x', node_name='x')"""

    def __init__(self, path, negotiate=True, wait=10):
        end = time.time() + wait
        while True:
            self.sock = socket.socket(socket.AF_UNIX)
            self.text, self.events, self.last = b'', [], 0
            try:
                self.sock.connect(path)
                self.greeting = self.receive(10)
                break
            except (OSError, EOFError):  # not there yet, or the socket of a server that was just killed
                self.sock.close()
                if time.time() > end:
                    raise
                time.sleep(.02)
        if negotiate:
            self.execute('qmp_capabilities')

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data if isinstance(data, bytes) else json.dumps(data).encode() + b'\n')

    def receive(self, timeout=60):
        """next message; None after timeout; EOFError at the end"""
        end = time.time() + timeout
        while b'\n' not in self.text:
            left = end - time.time()
            if left <= 0:
                return None
            self.sock.settimeout(left)
            try:
                data = self.sock.recv(1 << 16)
            except socket.timeout:
                return None
            if not data:
                raise EOFError('the QMP server closed the connection')
            self.text += data
        line, self.text = self.text.split(b'\n', 1)
        return json.loads(line)

    def raw(self, data, timeout=60):
        """sends as it is; the next message that is no event"""
        self.send(data)
        while True:
            msg = self.receive(timeout)
            if msg is None:
                raise TimeoutError('no answer to %r' % (data,))
            if 'event' not in msg:
                return msg
            self.events.append(msg)

    def execute(self, command, arguments=None, **more):
        args = dict(arguments or {}, **{k.replace('_', '-'): v for k, v in more.items()})
        self.last += 1
        msg = {'execute': command, 'id': self.last}
        if args:
            msg['arguments'] = args
        answer = self.raw(msg)
        if answer.get('id') != self.last:
            raise ValueError('answer %r is not to command %d' % (answer, self.last))
        if 'error' in answer:
            raise QmpError(answer['error'])
        return answer['return']

    def wait_event(self, name, timeout=60, **match):
        """next event of this name whose data has these members; None after timeout"""
        def fits(e):
            return e['event'] == name and all(e.get('data', {}).get(k) == v for k, v in match.items())
        end = time.time() + timeout
        seen = 0
        while True:
            for i in range(seen, len(self.events)):
                if fits(self.events[i]):
                    return self.events.pop(i)
            seen = len(self.events)
            left = end - time.time()
            msg = self.receive(left) if left > 0 else None
            if msg is None:
                return None
            self.events.append(msg)

    def drain(self, timeout=.2):
        """all events that come within `timeout` of each other"""
        while True:
            msg = self.receive(timeout)
            if msg is None:
                out, self.events = self.events, []
                return out
            self.events.append(msg)
