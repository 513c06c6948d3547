/// A type that models can write.
public protocol Generable: ConvertibleFromGeneratedContent, ConvertibleToGeneratedContent {
    associatedtype PartiallyGenerated: ConvertibleFromGeneratedContent = Self
    static var generationSchema: GenerationSchema { get }
}

public protocol ConvertibleFromGeneratedContent: SendableMetatype {
    init(_ content: GeneratedContent) throws
}

public protocol ConvertibleToGeneratedContent: InstructionsRepresentable, PromptRepresentable {
    var generatedContent: GeneratedContent { get }
}

extension ConvertibleToGeneratedContent {
    public var instructionsRepresentation: Instructions { Instructions(segments: [segment]) }
    public var promptRepresentation: Prompt { Prompt(segments: [segment]) }

    private var segment: Transcript.Segment {
        .structure(Transcript.StructuredSegment(source: "\(Self.self)", content: generatedContent))
    }
}

extension GeneratedContent: Generable {
    public static var generationSchema: GenerationSchema { GenerationSchema(document: GeneratedContent(kind: .bool(true))) }
    public init(_ content: GeneratedContent) throws { self = content }
    public var generatedContent: GeneratedContent { self }
}

extension String: Generable {
    public static var generationSchema: GenerationSchema { GenerationSchema(scalar: "string") }
    public init(_ content: GeneratedContent) throws {
        guard case .string(let text) = content.kind else { throw content.mismatch("text") }
        self = text
    }
    public var generatedContent: GeneratedContent { GeneratedContent(kind: .string(self)) }
    public var instructionsRepresentation: Instructions {
        Instructions(segments: [.text(Transcript.TextSegment(content: self))])
    }
    public var promptRepresentation: Prompt { Prompt(segments: [.text(Transcript.TextSegment(content: self))]) }
}

extension Int: Generable {
    public static var generationSchema: GenerationSchema { GenerationSchema(scalar: "integer") }
    public init(_ content: GeneratedContent) throws {
        guard case .number(let value) = content.kind, let whole = Int(exactly: value) else { throw content.mismatch("an integer") }
        self = whole
    }
    public var generatedContent: GeneratedContent { GeneratedContent(kind: .number(Double(self))) }
}

extension Double: Generable {
    public static var generationSchema: GenerationSchema { GenerationSchema(scalar: "number") }
    public init(_ content: GeneratedContent) throws {
        guard case .number(let value) = content.kind else { throw content.mismatch("a number") }
        self = value
    }
    public var generatedContent: GeneratedContent { GeneratedContent(kind: .number(self)) }
}

extension Bool: Generable {
    public static var generationSchema: GenerationSchema { GenerationSchema(scalar: "boolean") }
    public init(_ content: GeneratedContent) throws {
        guard case .bool(let value) = content.kind else { throw content.mismatch("true or false") }
        self = value
    }
    public var generatedContent: GeneratedContent { GeneratedContent(kind: .bool(self)) }
}

extension GeneratedContent {
    func mismatch(_ expected: String) -> ParsingError {
        ParsingError(rawContent: jsonString, debugDescription: "\(expected) was expected")
    }
}
