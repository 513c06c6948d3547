import Foundation

/// Where an executor writes its answer. As in Apple's module, only the constructors of events are public.
public struct LanguageModelExecutorGenerationChannel: AsyncSequence, Sendable {
    public typealias Metadata = [String: any Sendable & Codable & Equatable]

    public struct Usage: Sendable {
        public struct Input: Sendable, Equatable {
            public var totalTokenCount: Int
            public var cachedTokenCount: Int
            public init(totalTokenCount: Int, cachedTokenCount: Int) {
                (self.totalTokenCount, self.cachedTokenCount) = (totalTokenCount, cachedTokenCount)
            }
        }

        public struct Output: Sendable, Equatable {
            public var totalTokenCount: Int
            public var reasoningTokenCount: Int
            public init(totalTokenCount: Int, reasoningTokenCount: Int) {
                (self.totalTokenCount, self.reasoningTokenCount) = (totalTokenCount, reasoningTokenCount)
            }
        }

        public var input: Input
        public var output: Output
    }

    public struct Event: Sendable {
        enum Kind: Sendable {
            case response(Response.Action)
            case reasoning(Reasoning.Action)
            case toolCalls(ToolCalls.Action)
        }

        let entryID: String?
        let kind: Kind

        public static func response(entryID: String? = nil, action: Response.Action) -> Event {
            Event(entryID: entryID, kind: .response(action))
        }
        public static func reasoning(entryID: String? = nil, action: Reasoning.Action) -> Event {
            Event(entryID: entryID, kind: .reasoning(action))
        }
        public static func toolCalls(entryID: String? = nil, action: ToolCalls.Action) -> Event {
            Event(entryID: entryID, kind: .toolCalls(action))
        }
    }

    private let stream: AsyncThrowingStream<Event, any Error>
    private let continuation: AsyncThrowingStream<Event, any Error>.Continuation

    public init() { (stream, continuation) = AsyncThrowingStream.makeStream() }

    public func makeAsyncIterator() -> AsyncThrowingStream<Event, any Error>.AsyncIterator { stream.makeAsyncIterator() }

    nonisolated(nonsending) public func send(_ event: Event) async { continuation.yield(event) }

    func finish(throwing error: (any Error)? = nil) { continuation.finish(throwing: error) }
}

extension LanguageModelExecutorGenerationChannel {
    public struct Response: Sendable {
        public struct Action: Sendable {
            let change: Change

            public static func appendText(_ text: String, segmentID: String? = nil, tokenCount: Int) -> Action {
                Action(change: .text(text, tokenCount))
            }
            public static func updateMetadata(_ values: Metadata) -> Action { Action(change: .metadata(values)) }
            public static func updateUsage(input: Usage.Input, output: Usage.Output, metadata: Metadata = [:]) -> Action {
                Action(change: .usage(Usage(input: input, output: output)))
            }
        }
    }

    public struct Reasoning: Sendable {
        public struct Action: Sendable {
            let change: Change

            public static func appendText(_ text: String, segmentID: String? = nil, tokenCount: Int) -> Action {
                Action(change: .text(text, tokenCount))
            }
            public static func updateMetadata(_ values: Metadata) -> Action { Action(change: .metadata(values)) }
            public static func updateUsage(input: Usage.Input, output: Usage.Output, metadata: Metadata = [:]) -> Action {
                Action(change: .usage(Usage(input: input, output: output)))
            }
        }
    }

    public struct ToolCalls: Sendable {
        public struct Action: Sendable {
            let change: Change

            public static func toolCall(id: String, name: String, action: ToolCall.Action) -> Action {
                Action(change: .arguments(id, name, action.arguments, action.tokenCount))
            }
            public static func updateMetadata(_ values: Metadata) -> Action { Action(change: .metadata(values)) }
            public static func updateUsage(input: Usage.Input, output: Usage.Output, metadata: Metadata = [:]) -> Action {
                Action(change: .usage(Usage(input: input, output: output)))
            }
        }

        public struct ToolCall: Sendable {
            public struct Action: Sendable {
                let arguments: String
                let tokenCount: Int

                public static func appendArguments(_ content: String, tokenCount: Int) -> Action {
                    Action(arguments: content, tokenCount: tokenCount)
                }
            }
        }
    }

    /// What an action does to its entry.
    enum Change: Sendable {
        case text(String, Int)
        case arguments(String, String, String, Int)
        case metadata(Metadata)
        case usage(Usage)
    }
}
