/// Translates the chunks of a completion to events.
struct CompletionStream: EventReader {
    private(set) var partial = ""
    private(set) var isFinished = false
    private var hasStarted = false

    mutating func read(_ data: [UInt8], into output: inout [ChatEvent]) throws {
        let chunk = try decodeChunk(CompletionChunk.self, data)
        if !hasStarted {
            hasStarted = true
            output.append(.started(id: chunk.id ?? "", model: chunk.model ?? ""))
        }
        for choice in chunk.choices ?? [] { try read(choice, into: &output) }
        if let usage = chunk.usage { output.append(.usage(usage)) }
    }

    private mutating func read(_ choice: CompletionChunk.Choice, into output: inout [ChatEvent]) throws {
        guard choice.index ?? 0 == 0 else { throw HTTPFailure.malformed("a second answer, where one was asked for") }
        if let text = choice.text, !text.isEmpty {
            partial += text
            output.append(.text(text))
        }
        if let tokens = choice.logprobs?.list, !tokens.isEmpty { output.append(.logprobs(tokens)) }
        if let reason = choice.finish, !isFinished {
            isFinished = true
            output.append(.finished(reason))
        }
    }
}
