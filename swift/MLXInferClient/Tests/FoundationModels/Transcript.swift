import Foundation

/// The history of a session.
public struct Transcript: Sendable, Equatable {
    public enum Entry: Sendable, Identifiable, Equatable {
        case instructions(Instructions)
        case prompt(Prompt)
        case toolCalls(ToolCalls)
        case toolOutput(ToolOutput)
        case response(Response)
        case reasoning(Reasoning)

        public var id: String {
            switch self {
            case .instructions(let entry): entry.id
            case .prompt(let entry): entry.id
            case .toolCalls(let entry): entry.id
            case .toolOutput(let entry): entry.id
            case .response(let entry): entry.id
            case .reasoning(let entry): entry.id
            }
        }
    }

    private var entries: [Entry]

    public init(entries: some Sequence<Entry> = []) { self.entries = Array(entries) }
}

extension Transcript: RandomAccessCollection, MutableCollection, RangeReplaceableCollection {
    public init() { self.init(entries: []) }
    public var startIndex: Int { 0 }
    public var endIndex: Int { entries.count }
    public subscript(index: Int) -> Entry {
        get { entries[index] }
        set { entries[index] = newValue }
    }
    public mutating func replaceSubrange<Entries: Collection>(_ subrange: Range<Int>, with newElements: consuming Entries)
    where Entries.Element == Entry {
        entries.replaceSubrange(subrange, with: newElements)
    }
}

extension Transcript {
    public struct Instructions: Sendable, Identifiable, Equatable {
        public var id: String
        public var segments: [Segment]
        public var toolDefinitions: [ToolDefinition]

        public init(id: String = UUID().uuidString, segments: [Segment], toolDefinitions: [ToolDefinition]) {
            (self.id, self.segments, self.toolDefinitions) = (id, segments, toolDefinitions)
        }
    }

    public struct Prompt: Sendable, Identifiable, Equatable {
        public var id: String
        public var segments: [Segment]
        public var options: GenerationOptions
        public var contextOptions: ContextOptions
        public var metadata: [String: any Codable & Sendable & Equatable]
        public var responseFormat: ResponseFormat?

        public init(
            id: String = UUID().uuidString, metadata: [String: any Codable & Sendable & Equatable] = [:], segments: [Segment],
            options: GenerationOptions = GenerationOptions(), responseFormat: ResponseFormat? = nil,
            contextOptions: ContextOptions = ContextOptions()
        ) {
            (self.id, self.segments, self.options, self.metadata) = (id, segments, options, metadata)
            (self.responseFormat, self.contextOptions) = (responseFormat, contextOptions)
        }

        public static func == (left: Prompt, right: Prompt) -> Bool { left.id == right.id && left.segments == right.segments }
    }

    public struct ResponseFormat: Sendable, Equatable {
        public enum Kind: Sendable {
            case schema(GenerationSchema)
        }

        public let kind: Kind
        public var name: String { schema.name }
        public init(schema: GenerationSchema) { kind = .schema(schema) }
        public init<Content: Generable>(type: Content.Type) { kind = .schema(Content.generationSchema) }
        public static func == (left: ResponseFormat, right: ResponseFormat) -> Bool { left.schema.document == right.schema.document }
        private var schema: GenerationSchema {
            switch kind {
            case .schema(let schema): schema
            }
        }
    }

    public struct ToolDefinition: Sendable, Equatable {
        public var name: String
        public var description: String
        public var parameters: GenerationSchema

        public init(name: String, description: String, parameters: GenerationSchema) {
            (self.name, self.description, self.parameters) = (name, description, parameters)
        }

        public init(tool: some Tool) { self.init(name: tool.name, description: tool.description, parameters: tool.parameters) }

        public static func == (left: ToolDefinition, right: ToolDefinition) -> Bool { left.name == right.name }
    }

    public struct ToolCalls: Sendable, Identifiable, Equatable, RandomAccessCollection {
        public var id: String
        private var calls: [ToolCall]

        public init(id: String = UUID().uuidString, _ calls: some Sequence<ToolCall>) { (self.id, self.calls) = (id, Array(calls)) }

        public var startIndex: Int { 0 }
        public var endIndex: Int { calls.count }
        public subscript(position: Int) -> ToolCall { calls[position] }
    }

    public struct ToolCall: Sendable, Identifiable, Equatable {
        public var id: String
        public var toolName: String
        public var arguments: GeneratedContent

        public init(id: String, toolName: String, arguments: GeneratedContent) {
            (self.id, self.toolName, self.arguments) = (id, toolName, arguments)
        }
    }

    public struct ToolOutput: Sendable, Identifiable, Equatable {
        public var id: String
        public var toolName: String
        public var segments: [Segment]

        public init(id: String, toolName: String, segments: [Segment]) {
            (self.id, self.toolName, self.segments) = (id, toolName, segments)
        }
    }

    public struct Response: Sendable, Identifiable, Equatable {
        public var id: String
        public var metadata: [String: any Codable & Sendable & Equatable]
        public var segments: [Segment]

        public init(
            id: String = UUID().uuidString, metadata: [String: any Sendable & Codable & Equatable] = [:], segments: [Segment]
        ) {
            (self.id, self.metadata, self.segments) = (id, metadata, segments)
        }

        public static func == (left: Response, right: Response) -> Bool { left.id == right.id && left.segments == right.segments }
    }

    public struct Reasoning: Sendable, Identifiable, Equatable {
        public var id: String
        public var segments: [Segment]
        public var signature: Data?

        public init(id: String = UUID().uuidString, segments: [Segment], signature: Data? = nil) {
            (self.id, self.segments, self.signature) = (id, segments, signature)
        }
    }
}
