extension Client {
    /// What `work` gives, with all its errors as ``MLXInferError``, so that a `catch` can name each of them.
    ///
    /// ```swift
    /// do throws(MLXInferError) {
    ///     let answer = try await client.typed { try await $0.respond(to: "Hello") }
    /// } catch {
    ///     switch error { ... }
    /// }
    /// ```
    ///
    /// Cancelling the task throws ``MLXInferError/cancelled``, and an error of the app's own is ``MLXInferError/other(_:)``.
    public func typed<Value>(
        isolation: isolated (any Actor)? = #isolation, _ work: (Client) async throws -> Value
    ) async throws(MLXInferError) -> Value {
        do {
            return try await work(self)
        } catch {
            throw MLXInferError(error)
        }
    }
}

extension AnswerEvents {
    /// The same events with errors of one type, ``MLXInferError``, where cancelling the task is ``MLXInferError/cancelled``.
    public var typed: TypedEvents<Element> { TypedEvents(events: self) }
}

/// The events of an answer, whose end may be an ``MLXInferError`` and nothing else.
public struct TypedEvents<Element: Sendable>: AsyncSequence, Sendable {
    let events: AnswerEvents<Element>

    public struct AsyncIterator: AsyncIteratorProtocol, Sendable {
        var events: AnswerEvents<Element>.AsyncIterator

        public mutating func next() async throws(MLXInferError) -> Element? {
            do {
                return try await events.next()
            } catch {
                throw MLXInferError(error)
            }
        }
    }

    public func makeAsyncIterator() -> AsyncIterator { AsyncIterator(events: events.makeAsyncIterator()) }
}
