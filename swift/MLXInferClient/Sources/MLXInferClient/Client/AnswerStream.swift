typealias ChatStream = AnswerStream<ChatChunk>
typealias CompletionStream = AnswerStream<CompletionChunk>

/// Translates the chunks of an answer to events. A pure value: the same chunks always give the same events.
struct AnswerStream<Chunk: AnswerChunk>: EventReader {
    private(set) var partial = ""
    private(set) var isFinished = false
    private var hasStarted = false

    init() {}

    mutating func read(_ data: [UInt8], into output: inout [ChatEvent]) throws {
        let chunk = try decodeChunk(Chunk.self, data)
        if !hasStarted {
            hasStarted = true
            output.append(.started(id: chunk.id ?? "", model: chunk.model ?? ""))
        }
        for choice in chunk.choices ?? [] { try read(choice, into: &output) }
        if let usage = chunk.usage { output.append(.usage(usage)) }
    }

    private mutating func read(_ choice: Chunk.Choice, into output: inout [ChatEvent]) throws {
        guard choice.index ?? 0 == 0 else { throw HTTPFailure.malformed("a second answer, where one was asked for") }
        if let reasoning = choice.reasoning, !reasoning.isEmpty { output.append(.reasoning(reasoning)) }
        if let text = choice.text, !text.isEmpty {
            partial += text
            output.append(.text(text))
        }
        output += choice.calls.map(ChatEvent.toolCallDelta)
        if let tokens = choice.tokens, !tokens.isEmpty { output.append(.logprobs(tokens)) }
        if let reason = choice.finish, !isFinished {
            isFinished = true
            output.append(.finished(reason))
        }
    }
}
