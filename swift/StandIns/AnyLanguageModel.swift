// Declarations of AnyLanguageModel 0.8, a package on GitHub: those that examples/swift/MLXInferAnyLanguageModel uses. Nothing here runs.
import Foundation

public enum Availability<UnavailableReason> {
    case available
    case unavailable(UnavailableReason)
}

public protocol CustomGenerationOptions: Equatable, Sendable {}
extension Never: CustomGenerationOptions {}

public protocol LanguageModel: Sendable {
    associatedtype UnavailableReason
    associatedtype CustomGenerationOptions: AnyLanguageModel.CustomGenerationOptions = Never
    var availability: Availability<UnavailableReason> { get }
    func prewarm(for session: LanguageModelSession, promptPrefix: Prompt?)
    func respond<Content>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type, includeSchemaInPrompt: Bool,
        options: GenerationOptions
    ) async throws -> LanguageModelSession.Response<Content> where Content: Generable
    func streamResponse<Content>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type, includeSchemaInPrompt: Bool,
        options: GenerationOptions
    ) -> sending LanguageModelSession.ResponseStream<Content> where Content: Generable
}

extension LanguageModel where UnavailableReason == Never {
    public var availability: Availability<UnavailableReason> { fatalError() }
}

public struct GenerationOptions: Sendable, Equatable {
    public struct SamplingMode: Sendable, Equatable {
        public static var greedy: SamplingMode { fatalError() }
    }

    public var sampling: SamplingMode?
    public var temperature: Double?
    public var maximumResponseTokens: Int?
    public init(sampling: SamplingMode? = nil, temperature: Double? = nil, maximumResponseTokens: Int? = nil) { fatalError() }
    public subscript<Model: LanguageModel>(custom modelType: Model.Type) -> Model.CustomGenerationOptions? {
        get { fatalError() }
        set { fatalError() }
    }
}

public protocol SendableMetatype: Sendable {}

public protocol ConvertibleFromGeneratedContent: SendableMetatype {
    init(_ content: GeneratedContent) throws
}

public protocol ConvertibleToGeneratedContent: PromptRepresentable {
    var generatedContent: GeneratedContent { get }
}

public protocol Generable: ConvertibleFromGeneratedContent, ConvertibleToGeneratedContent {
    associatedtype PartiallyGenerated: ConvertibleFromGeneratedContent = Self
    static var generationSchema: GenerationSchema { get }
}

extension ConvertibleToGeneratedContent {
    public var promptRepresentation: Prompt { fatalError() }
}

extension String: Generable {
    public static var generationSchema: GenerationSchema { fatalError() }
    public init(_ content: GeneratedContent) throws { fatalError() }
    public var generatedContent: GeneratedContent { fatalError() }
}

public struct GenerationSchema: Equatable, Codable, Sendable {}

public struct GeneratedContent: Sendable, Equatable, Codable, Generable {
    public enum Kind: Equatable, Sendable, Codable {
        case null
        case bool(Bool)
        case number(Double)
        case string(String)
        case array([GeneratedContent])
        case structure(properties: [String: GeneratedContent], orderedKeys: [String])
    }

    public let kind: Kind
    public static var generationSchema: GenerationSchema { fatalError() }
    public var generatedContent: GeneratedContent { fatalError() }
    public var jsonString: String { fatalError() }
    public init(_ content: GeneratedContent) throws { fatalError() }
    public init(_ value: some ConvertibleToGeneratedContent) { fatalError() }
    public init(properties: KeyValuePairs<String, any ConvertibleToGeneratedContent>) { fatalError() }
    public init(json: String) throws { fatalError() }
}

public protocol PromptRepresentable {
    var promptRepresentation: Prompt { get }
}

public struct Prompt: Sendable, PromptRepresentable {
    public var description: String { fatalError() }
    public var promptRepresentation: Prompt { fatalError() }
}

public protocol Tool<Arguments, Output>: Sendable {
    associatedtype Output: PromptRepresentable
    associatedtype Arguments: ConvertibleFromGeneratedContent
    var name: String { get }
    var description: String { get }
    var parameters: GenerationSchema { get }
    func call(arguments: Arguments) async throws -> Output
}

public enum ToolExecutionDecision: Sendable {
    case execute
    case stop
    case provideOutput([Transcript.Segment])
}

public protocol ToolExecutionDelegate: Sendable {
    func didGenerateToolCalls(_ toolCalls: [Transcript.ToolCall], in session: LanguageModelSession) async
    func toolCallDecision(for toolCall: Transcript.ToolCall, in session: LanguageModelSession) async -> ToolExecutionDecision
    func didExecuteToolCall(_ toolCall: Transcript.ToolCall, output: Transcript.ToolOutput, in session: LanguageModelSession) async
    func didFailToolCall(_ toolCall: Transcript.ToolCall, error: any Error, in session: LanguageModelSession) async
}

public final class LanguageModelSession: @unchecked Sendable {
    public struct Response<Content: Generable>: Sendable {
        public init(content: Content, rawContent: GeneratedContent, transcriptEntries: ArraySlice<Transcript.Entry>) { fatalError() }
    }

    public struct ResponseStream<Content: Generable>: Sendable where Content.PartiallyGenerated: Sendable {
        public struct Snapshot: Sendable {
            public init(content: Content.PartiallyGenerated, rawContent: GeneratedContent) { fatalError() }
        }

        public init(stream: AsyncThrowingStream<Snapshot, any Error>) { fatalError() }
    }

    public enum GenerationError: Error {
        public struct Context: Sendable {
            public init(debugDescription: String) { fatalError() }
        }

        case exceededContextWindowSize(Context)
        case unsupportedGuide(Context)
        case decodingFailure(Context)
        case rateLimited(Context)
    }

    public struct ToolCallError: Error {
        public init(tool: any Tool, underlyingError: any Error) { fatalError() }
    }

    public var transcript: Transcript { fatalError() }
    public let tools: [any Tool]
    public var toolExecutionDelegate: (any ToolExecutionDelegate)?
    init() { fatalError() }
}

public struct Transcript: Sendable, RandomAccessCollection {
    public enum Entry: Sendable {
        case instructions(Instructions)
        case prompt(Prompt)
        case toolCalls(ToolCalls)
        case toolOutput(ToolOutput)
        case response(Response)
    }

    public enum Segment: Sendable {
        case text(TextSegment)
        case structure(StructuredSegment)
        case image(ImageSegment)
    }

    public struct TextSegment: Sendable {
        public var content: String
        public init(id: String = "", content: String) { fatalError() }
    }

    public struct StructuredSegment: Sendable {
        public var content: GeneratedContent
        public init(id: String = "", source: String, content: GeneratedContent) { fatalError() }
    }

    public struct ImageSegment: Sendable {
        public enum Source: Sendable {
            case data(Data, mimeType: String)
            case url(URL)
        }

        public let source: Source
        public init(id: String = "", data: Data, mimeType: String) { fatalError() }
    }

    public struct Instructions: Sendable {
        public var segments: [Segment]
    }

    public struct Prompt: Sendable {
        public var segments: [Segment]
    }

    public struct Response: Sendable {
        public var segments: [Segment]
    }

    public struct ToolCalls: Sendable, RandomAccessCollection {
        public init(id: String = "", _ calls: some Sequence<ToolCall>) { fatalError() }
        public var startIndex: Int { fatalError() }
        public var endIndex: Int { fatalError() }
        public subscript(position: Int) -> ToolCall { fatalError() }
    }

    public struct ToolCall: Sendable {
        public var id: String
        public var toolName: String
        public var arguments: GeneratedContent
        public init(id: String, toolName: String, arguments: GeneratedContent) { fatalError() }
    }

    public struct ToolOutput: Sendable {
        public var id: String
        public var toolName: String
        public var segments: [Segment]
        public init(id: String, toolName: String, segments: [Segment]) { fatalError() }
    }

    public var startIndex: Int { fatalError() }
    public var endIndex: Int { fatalError() }
    public subscript(index: Int) -> Entry { fatalError() }
}
