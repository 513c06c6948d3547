/// Translates the chunks of a chat to events. A pure value: the same chunks always give the same events.
struct ChatStream: EventReader {
    private(set) var partial = ""
    private(set) var isFinished = false
    private var hasStarted = false

    mutating func read(_ data: [UInt8], into output: inout [ChatEvent]) throws {
        let chunk = try decodeChunk(ChatChunk.self, data)
        if !hasStarted {
            hasStarted = true
            output.append(.started(id: chunk.id ?? "", model: chunk.model ?? ""))
        }
        for choice in chunk.choices ?? [] { try read(choice, into: &output) }
        if let usage = chunk.usage { output.append(.usage(usage)) }
    }

    private mutating func read(_ choice: ChatChunk.Choice, into output: inout [ChatEvent]) throws {
        guard choice.index ?? 0 == 0 else { throw HTTPFailure.malformed("a second answer, where one was asked for") }
        if let reasoning = choice.delta?.reasoningContent ?? choice.delta?.reasoning, !reasoning.isEmpty {
            output.append(.reasoning(reasoning))
        }
        if let text = choice.delta?.content, !text.isEmpty {
            partial += text
            output.append(.text(text))
        }
        for (place, call) in (choice.delta?.calls ?? []).enumerated() {
            let (name, arguments) = (call.function?.name, call.function?.arguments ?? "")
            output.append(.toolCallDelta(ToolCallDelta(index: call.index ?? place, id: call.id, name: name, arguments: arguments)))
        }
        if let tokens = choice.logprobs?.content, !tokens.isEmpty { output.append(.logprobs(tokens)) }
        if let reason = choice.finish, !isFinished {
            isFinished = true
            output.append(.finished(reason))
        }
    }
}
