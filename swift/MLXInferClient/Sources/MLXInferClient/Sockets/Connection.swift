#if canImport(Darwin)
    import Darwin
#elseif canImport(Glibc)
    import Glibc
#elseif canImport(Musl)
    import Musl
#endif

/// A connected stream socket that belongs to one thread; it is closed when it goes out of scope.
final class Connection {
    /// A failed call on a connection that existed.
    struct Broken: Error {
        let number: Int32
        var reason: String { System.reason(number) }
        /// The server has closed its side, and may have said why before.
        var isClosedByPeer: Bool { number == EPIPE || number == ECONNRESET }
    }

    private let descriptor: Int32
    private let waker: Waker

    /// Connects to an endpoint, trying the addresses of a host one after the other.
    init(to endpoint: Endpoint, waker: Waker, deadline: WaitClock.Instant?) throws {
        self.waker = waker
        descriptor = try Self.descriptor(to: endpoint, waker, deadline)
    }

    deinit { System.closeDescriptor(descriptor) }

    /// Sends all the bytes; each wait for room takes at most `patience`.
    func send(_ bytes: [UInt8], patience: Duration, deadline: WaitClock.Instant?) throws {
        var sent = 0
        while sent < bytes.count {
            let count = bytes.withUnsafeBytes { System.sendBytes(descriptor, UnsafeRawBufferPointer(rebasing: $0[sent...])) }
            if count >= 0 {
                sent += count
            } else if try mustWait() {
                try wait(for: POLLOUT, as: .sending, patience, deadline)
            }
        }
    }

    /// Receives at least one byte into the front of `buffer` and returns how many; 0 where the server has closed the connection.
    func receive(into buffer: inout [UInt8], patience: Duration, deadline: WaitClock.Instant?) throws -> Int {
        while true {
            try wait(for: POLLIN, as: .answer, patience, deadline)
            let count = buffer.withUnsafeMutableBytes { System.receiveBytes(descriptor, $0) }
            if count >= 0 { return count }
            _ = try mustWait()
        }
    }

    private func wait(
        for events: Int32, as waiting: MLXInferError.Waiting, _ patience: Duration, _ deadline: WaitClock.Instant?
    ) throws {
        let idle = WaitClock.now + patience
        let limit = deadline.map { min($0, idle) } ?? idle
        guard try waker.wait(for: events, on: descriptor, until: limit) else {
            throw MLXInferError.timedOut(limit == idle ? waiting : .wholeAnswer, partial: "")
        }
    }

    /// True where the last call would have blocked, false where it was interrupted by a signal.
    private func mustWait() throws -> Bool {
        let number = System.lastError
        if number == EINTR { return false }
        guard number == EAGAIN || number == EWOULDBLOCK else { throw Broken(number: number) }
        return true
    }
}

extension Connection {
    private static func descriptor(to endpoint: Endpoint, _ waker: Waker, _ deadline: WaitClock.Instant?) throws -> Int32 {
        switch endpoint.kind {
        case .unix(let path): return try descriptor(to: SocketAddress(path: path), endpoint, waker, deadline)
        case .tcp(let host, let port):
            var failure: any Error = MLXInferError.connectionFailed("\(host) has no address")
            for address in try SocketAddress.resolve(host: host, port: port) {
                do {
                    return try descriptor(to: address, endpoint, waker, deadline)
                } catch MLXInferError.cancelled {
                    throw MLXInferError.cancelled
                } catch {
                    failure = error
                }
            }
            throw failure
        }
    }

    private static func descriptor(
        to address: SocketAddress, _ endpoint: Endpoint, _ waker: Waker, _ deadline: WaitClock.Instant?
    ) throws -> Int32 {
        let descriptor = socket(address.family, System.stream, 0)
        guard descriptor >= 0 else { throw MLXInferError.connectionFailed(System.reason(System.lastError)) }
        do {
            System.prepare(descriptor)
            if address.family != AF_UNIX { System.sendAtOnce(descriptor) }
            try connect(descriptor, to: address, endpoint, waker, deadline)
            return descriptor
        } catch {
            System.closeDescriptor(descriptor)
            throw error
        }
    }

    private static func connect(
        _ descriptor: Int32, to address: SocketAddress, _ endpoint: Endpoint, _ waker: Waker, _ deadline: WaitClock.Instant?
    ) throws {
        if address.withPointer({ System.connectSocket(descriptor, $0, $1) }) == 0 { return }
        var number = System.lastError
        if number == EINPROGRESS || number == EINTR {
            guard try waker.wait(for: POLLOUT, on: descriptor, until: deadline) else {
                throw MLXInferError.timedOut(.connection, partial: "")
            }
            number = System.pendingError(descriptor)
        }
        switch number {
        case 0: return
        // Linux answers EAGAIN where a Unix socket's queue of connections is full, others ECONNREFUSED.
        case ENOENT, ECONNREFUSED, EAGAIN: throw MLXInferError.serverNotRunning(endpoint.description)
        case EACCES, EPERM: throw MLXInferError.permissionDenied(endpoint.description)
        default: throw MLXInferError.connectionFailed("\(endpoint): \(System.reason(number))")
        }
    }
}
