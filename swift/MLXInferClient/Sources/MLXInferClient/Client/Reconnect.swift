/// How long to go on trying to connect, for instance while the server restarts.
///
/// Only what the server has not begun to answer is tried again: connecting, and once a request whose connection was closed before the
/// first byte of an answer. A request that was answered in part is never sent a second time.
public struct Reconnect: Sendable, Hashable {
    /// From the first attempt on, until when to begin another.
    public var upTo: Duration
    /// The pause after the first attempt; it doubles each time.
    public var firstPause: Duration
    /// The longest pause.
    public var longestPause: Duration

    public init(upTo: Duration = .seconds(1), firstPause: Duration = .milliseconds(50), longestPause: Duration = .seconds(1)) {
        (self.upTo, self.firstPause, self.longestPause) = (upTo, firstPause, longestPause)
    }

    /// One attempt only.
    public static let never = Reconnect(upTo: .zero)
}
