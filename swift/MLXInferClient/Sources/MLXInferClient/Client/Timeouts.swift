/// The clock of every wait. It stands still while the machine sleeps: an answer that a sleep interrupts is not late afterwards.
typealias WaitClock = SuspendingClock

/// How long to wait. The time in which the machine sleeps does not count.
public struct Timeouts: Sendable, Hashable {
    /// For a connection to be made, each time.
    public var connection: Duration
    /// For the next byte. The server sends a comment every few seconds while it has nothing to say, so that a long prompt does not
    /// run into this.
    public var silence: Duration
    /// For a whole answer, connecting included; nil is without limit.
    public var wholeAnswer: Duration?

    public init(connection: Duration = .seconds(5), silence: Duration = .seconds(60), wholeAnswer: Duration? = nil) {
        (self.connection, self.silence, self.wholeAnswer) = (connection, silence, wholeAnswer)
    }
}
