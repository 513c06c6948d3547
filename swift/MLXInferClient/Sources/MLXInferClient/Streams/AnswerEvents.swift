/// What arrives of an answer, in its order, for one reader.
///
/// Cancelling the task that reads throws `CancellationError`, and ends the answer at the server; dropping the sequence and its iterators
/// ends it as well. A slow reader does not hold up the server: what waits is joined, so that few elements have all of the answer.
public struct AnswerEvents<Element: Sendable>: AsyncSequence, Sendable {
    /// Stops the answer when nobody can read it any more.
    fileprivate final class Source: Sendable {
        let buffer: EventBuffer<Element>

        init(_ buffer: EventBuffer<Element>) { self.buffer = buffer }

        deinit { buffer.cancel() }
    }

    private let source: Source

    /// - Parameter start: Begins to fill the buffer; what it returns stops that.
    init(_ buffer: EventBuffer<Element>, start: (EventBuffer<Element>) throws -> @Sendable () -> Void) {
        source = Source(buffer)
        do {
            buffer.onStop(try start(buffer))
        } catch {
            buffer.finish(.failure(error))
        }
    }

    /// The number of elements that have arrived and were not read.
    var waiting: Int { source.buffer.count }

    public struct AsyncIterator: AsyncIteratorProtocol, Sendable {
        fileprivate let source: Source

        public mutating func next() async throws -> Element? { try await source.buffer.next() }
    }

    public func makeAsyncIterator() -> AsyncIterator { AsyncIterator(source: source) }
}

extension AnswerEvents {
    /// Elements that a task adds; the task is cancelled when nobody wants them any more.
    init(_ buffer: EventBuffer<Element>, fill: @escaping @Sendable (EventBuffer<Element>) async throws -> Void) {
        self.init(buffer) { buffer in
            let task = Task {
                do {
                    try await fill(buffer)
                    buffer.finish()
                } catch {
                    buffer.finish(.failure(error))
                }
            }
            return { task.cancel() }
        }
    }
}

extension EventBuffer where Element == ChatEvent {
    /// Keeps 256 events apart, and joins pieces of texts and calls after that.
    static func events() -> EventBuffer<ChatEvent> {
        EventBuffer(limit: 256) { event, waiting in
            waiting.indices.reversed().prefix(8).contains { waiting[$0].join(event) }
        }
    }
}

extension ChatEvent {
    /// Adds the next event to this one, if both are pieces of the same thing. The text is not copied for it.
    mutating func join(_ next: ChatEvent) -> Bool {
        switch next {
        case .text(let piece):
            guard case .text(var text) = self else { return false }
            self = .text("")
            text += piece
            self = .text(text)
        case .reasoning(let piece):
            guard case .reasoning(var text) = self else { return false }
            self = .reasoning("")
            text += piece
            self = .reasoning(text)
        case .logprobs(let more):
            guard case .logprobs(var tokens) = self else { return false }
            self = .logprobs([])
            tokens += more
            self = .logprobs(tokens)
        case .toolCallDelta(let piece):
            guard case .toolCallDelta(var call) = self, call.index == piece.index, piece.id == nil, piece.name == nil else { return false }
            self = .text("")
            call.arguments += piece.arguments
            self = .toolCallDelta(call)
        default: return false
        }
        return true
    }
}
