import Foundation

/// Runs blocking work on a thread of its own, never on the threads that Swift's tasks share.
enum IOThread {
    static func start(_ work: @escaping @Sendable () -> Void) {
        let thread = Thread(block: work)
        thread.name = "MLXInferClient"
        thread.stackSize = 2 << 20
        thread.qualityOfService = .userInitiated
        thread.start()
    }

    /// The result of blocking work; cancelling the task wakes it, which then throws `CancellationError`.
    static func result<Output: Sendable>(of work: @escaping @Sendable (Waker) throws -> Output) async throws -> Output {
        let waker = try Waker()
        return try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { continuation in
                start { continuation.resume(with: Result { try work(waker) }.mapError(MLXInferError.untyped)) }
            }
        } onCancel: {
            waker.wake()
        }
    }

    /// A stream of what blocking work hands out. The work is woken when the task that reads the stream is cancelled, which then throws
    /// `CancellationError`, and when nobody can read the stream any more.
    static func stream<Element: Sendable>(
        of work: @escaping @Sendable (Waker, (Element) -> Void) throws -> Void
    ) -> AsyncThrowingStream<Element, any Error> {
        AsyncThrowingStream { continuation in
            do {
                let waker = try Waker()
                continuation.onTermination = { termination in
                    guard case .cancelled = termination else { return }
                    waker.wake()
                    continuation.finish(throwing: CancellationError())
                }
                start {
                    do {
                        try work(waker) { continuation.yield($0) }
                        continuation.finish()
                    } catch {
                        continuation.finish(throwing: MLXInferError.untyped(error))
                    }
                }
            } catch {
                continuation.finish(throwing: error)
            }
        }
    }
}
