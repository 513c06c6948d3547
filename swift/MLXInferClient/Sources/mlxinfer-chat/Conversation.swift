import MLXInferClient

/// A conversation in the terminal.
struct Conversation: Sendable {
    let client: Client
    let options: SamplingOptions
    private(set) var messages: [Message]

    init(client: Client, options: SamplingOptions, system: String?) {
        (self.client, self.options) = (client, options)
        messages = system.map { [.system($0)] } ?? []
    }

    /// How an answer ended.
    enum Outcome { case answered, stopped, failed }

    /// Asks, and shows the answer while it comes. What could not be answered is not kept.
    mutating func ask(_ prompt: String, _ interrupts: Interrupts) async -> Outcome {
        let asked = messages + [.user(prompt)]
        let (answer, error) = await interrupts.cancelling { [client, options] in await Self.show(client.chat(asked, options: options)) }
        if error != nil && error != .cancelled { return .failed }
        messages = asked + [answer.message]
        return error == nil ? .answered : .stopped
    }

    private static func show(_ events: AnswerEvents<ChatEvent>) async -> (ChatResponse, MLXInferError?) {
        var answer = ChatResponse()
        var speed = Speed()
        let start = ContinuousClock.now
        do {
            for try await event in events {
                answer.add(event)
                if case .text(let piece) = event {
                    speed.piece(after: .now - start)
                    Terminal.answer(piece)
                }
            }
            Terminal.answer("\n")
            if let usage = answer.usage { Terminal.note("[\(speed.summary(usage))]") }
            return (answer, nil)
        } catch {
            let error = MLXInferError(error)
            Terminal.answer(answer.text.isEmpty ? "" : "\n")
            Terminal.note(error == .cancelled ? "[stopped]" : "mlxinfer-chat: \(error)")
            return (answer, error)
        }
    }
}
