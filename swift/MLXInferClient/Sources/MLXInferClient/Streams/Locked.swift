import Foundation

/// State that several threads share, one at a time.
///
/// `Synchronization.Mutex` does the same from macOS 15 on. `@unchecked`, because the compiler cannot see that the lock guards `state`,
/// which nothing reaches without it.
final class Locked<State>: @unchecked Sendable {
    private let lock = NSLock()
    private var state: State

    init(_ state: sending State) { self.state = state }

    func withLock<Result>(_ body: (inout State) throws -> Result) rethrows -> Result {
        lock.lock()
        defer { lock.unlock() }
        return try body(&state)
    }
}
