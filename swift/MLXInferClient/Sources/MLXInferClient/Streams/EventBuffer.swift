/// Elements that have arrived and wait for their reader. Adding never waits, so that a slow reader holds up no server.
///
/// At most ``limit`` elements wait; later ones are joined with those that do. All of an answer is kept, in few elements.
final class EventBuffer<Element: Sendable>: Sendable {
    /// Adds an element to one of those that wait; false if it fits none of them.
    typealias Join = @Sendable (_ element: Element, _ waiting: inout ArraySlice<Element>) -> Bool

    private struct State {
        var waiting: ArraySlice<Element> = []
        var readers: [CheckedContinuation<Element?, any Error>] = []
        /// The end of the elements, once it is known; an error is thrown once.
        var end: Result<Void, any Error>?
        var stop: (@Sendable () -> Void)?
    }

    private let limit: Int
    private let join: Join
    private let state = Locked(State())

    init(limit: Int, join: @escaping Join) { (self.limit, self.join) = (limit, join) }

    /// The number of elements that wait.
    var count: Int { state.withLock { $0.waiting.count } }

    /// Says how the source of the elements is stopped, once nobody wants them; at once if that is so already.
    func onStop(_ stop: @escaping @Sendable () -> Void) {
        let isOver = state.withLock { state in
            if state.end == nil { state.stop = stop }
            return state.end != nil
        }
        if isOver { stop() }
    }

    func add(_ element: Element) {
        let reader = state.withLock { state -> CheckedContinuation<Element?, any Error>? in
            guard state.end == nil else { return nil }
            if !state.readers.isEmpty { return state.readers.removeFirst() }
            if state.waiting.count < limit || !join(element, &state.waiting) { state.waiting.append(element) }
            return nil
        }
        reader?.resume(returning: element)
    }

    /// Ends the elements; of two ends the first one counts.
    func finish(_ end: Result<Void, any Error> = .success(())) { close(end) }

    /// Stops the source; what has arrived can still be read, and then the error.
    func cancel() { close(.failure(CancellationError()))?() }

    /// Returns how the source is stopped if this is the first end. Nothing keeps the source any longer.
    @discardableResult
    private func close(_ end: Result<Void, any Error>) -> (@Sendable () -> Void)? {
        let (readers, stop) = state.withLock { state -> ([CheckedContinuation<Element?, any Error>], (@Sendable () -> Void)?) in
            guard state.end == nil else { return ([], nil) }
            defer { (state.readers, state.stop) = ([], nil) }
            // A reader that waits gets the error; later ones find the end.
            state.end = state.readers.isEmpty ? end : .success(())
            return (state.readers, state.stop)
        }
        for (index, reader) in readers.enumerated() { reader.resume(with: index == 0 ? end.map { nil } : .success(nil)) }
        return stop
    }

    /// The next element; nil at the end.
    func next() async throws -> Element? {
        try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { reader in
                let result = state.withLock { state -> Result<Element?, any Error>? in
                    if let element = state.waiting.popFirst() { return .success(element) }
                    guard let end = state.end else {
                        state.readers.append(reader)
                        return nil
                    }
                    state.end = .success(())
                    return end.map { nil }
                }
                if let result { reader.resume(with: result) }
            }
        } onCancel: {
            cancel()
        }
    }
}
