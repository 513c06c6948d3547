/// A call that the app has run.
public struct ToolResult: Sendable, Hashable {
    public let call: ToolCall
    /// The result, or the error's words.
    public let parts: [ContentPart]
    /// True if the tool failed.
    public let isFailure: Bool

    public init(call: ToolCall, parts: [ContentPart], isFailure: Bool = false) {
        (self.call, self.parts, self.isFailure) = (call, parts, isFailure)
    }

    /// The result as a message, for the next request of the conversation.
    public var message: Message { .tool(parts, callID: call.id) }
}

/// One thing that happens while an answer comes that may call tools.
public enum ToolEvent: Sendable, Hashable {
    /// The next event of an answer; each ``ChatEvent/started(id:model:)`` begins another answer.
    case answer(ChatEvent)
    /// The answer has ended with calls, which are run now.
    case calling([ToolCall])
    /// The results of the calls, in their order.
    case called([ToolResult])
}

/// An answer, and what was said and called before it.
public struct ToolRun: Sendable, Hashable {
    /// The last answer.
    public private(set) var response = ChatResponse()
    /// All messages since the request: calls, their results, and the answer at the end.
    public private(set) var messages: [Message] = []
    /// The calls that were run, in their order.
    public private(set) var results: [ToolResult] = []

    public init() {}

    /// Takes the next event, for apps that show an answer while it comes.
    public mutating func add(_ event: ToolEvent) {
        switch event {
        case .answer(let event):
            if case .started = event { response = ChatResponse() }
            response.add(event)
            if case .finished(let reason) = event, reason != .toolCalls { messages.append(response.message) }
        case .calling: messages.append(response.message)
        case .called(let results):
            self.results += results
            messages += results.map(\.message)
        }
    }
}
