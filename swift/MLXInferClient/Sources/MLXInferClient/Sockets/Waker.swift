#if canImport(Darwin)
    import Darwin
#elseif canImport(Glibc)
    import Glibc
#elseif canImport(Musl)
    import Musl
#endif

/// Wakes a thread that waits for a connection, from any other thread: cancellation.
///
/// Only the thread that owns a connection touches its descriptor, so that none can be closed while another thread uses it; whoever
/// cancels writes into this pipe instead, and the owner closes the connection.
final class Waker: Sendable {
    private let readEnd: Int32
    private let writeEnd: Int32

    init() throws {
        var ends: [Int32] = [-1, -1]
        guard pipe(&ends) == 0 else { throw MLXInferError.connectionFailed(System.reason(System.lastError)) }
        (readEnd, writeEnd) = (ends[0], ends[1])
        for end in ends { System.prepare(end, isSocket: false) }
    }

    deinit {
        System.closeDescriptor(readEnd)
        System.closeDescriptor(writeEnd)
    }

    /// Ends every wait, the present one and all later ones.
    func wake() {
        var byte: UInt8 = 1
        _ = write(writeEnd, &byte, 1)
    }

    /// Throws ``MLXInferError/cancelled`` if it has been woken.
    func check() throws { _ = try wait(until: .now) }

    /// Waits until the descriptor is ready for `events`; without a descriptor, until the deadline.
    ///
    /// - Returns: False where the deadline has passed first.
    /// - Throws: ``MLXInferError/cancelled``.
    func wait(for events: Int32 = 0, on descriptor: Int32 = -1, until deadline: WaitClock.Instant?) throws -> Bool {
        var watched = [
            pollfd(fd: readEnd, events: Int16(POLLIN), revents: 0), pollfd(fd: descriptor, events: Int16(events), revents: 0),
        ]
        while true {
            let count = poll(&watched, nfds_t(watched.count), Self.milliseconds(until: deadline))
            if count < 0, System.lastError != EINTR { throw MLXInferError.connectionFailed(System.reason(System.lastError)) }
            if count > 0, watched[0].revents != 0 { throw MLXInferError.cancelled }
            if count > 0 { return true }
            if count == 0, let deadline, deadline <= .now { return false }
        }
    }

    private static func milliseconds(until deadline: WaitClock.Instant?) -> Int32 {
        guard let deadline else { return -1 }
        let left = WaitClock.now.duration(to: deadline)
        guard left > .zero else { return 0 }
        let (seconds, attoseconds) = left.components
        return seconds >= 1_000_000 ? 1_000_000_000 : Int32(seconds * 1000 + attoseconds / 1_000_000_000_000_000 + 1)
    }
}
