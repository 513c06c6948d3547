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

    /// What blocking work hands out. The work is woken when the task that reads is cancelled, and when nobody can read any more.
    static func events<Element: Sendable>(
        _ buffer: EventBuffer<Element>, of work: @escaping @Sendable (Waker, (Element) -> Void) throws -> Void
    ) -> AnswerEvents<Element> {
        AnswerEvents(buffer) { buffer in
            let waker = try Waker()
            start { buffer.finish(Result { try work(waker, buffer.add) }.mapError(MLXInferError.untyped)) }
            return { waker.wake() }
        }
    }
}
