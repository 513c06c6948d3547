import Testing

@testable import MLXInferClient

struct SchemaForRequestTests {
    private func text(_ json: String) throws -> String { try "\(JSONValue(parsing: json).schemaForRequest())" }

    @Test func propertiesComeInTheirDeclaredOrder() throws {
        let schema = #"{"type":"object","x-order":["zoo","ape"],"properties":{"ape":{},"zoo":{},"more":{}}}"#
        #expect(try text(schema) == #"{"properties":{"zoo":{},"ape":{},"more":{}},"type":"object"}"#)
    }

    @Test func definitionsMoveToTheRoot() throws {
        let schema = ##"""
            {"properties":{"a":{"$defs":{"B":{"$ref":"#/$defs/C"},"C":{"type":"string"}},"$ref":"#/$defs/B"}}}
            """##
        #expect(
            try text(schema) == ##"{"properties":{"a":{"$ref":"#/$defs/B"}},"$defs":{"B":{"$ref":"#/$defs/C"},"C":{"type":"string"}}}"##)
    }

    @Test func definitionsThatDifferGetDifferentNames() throws {
        let schema = ##"""
            {"$defs":{"A":{"type":"string"}},"items":[{"$ref":"#/$defs/A"},
             {"$defs":{"A":{"type":"integer"}},"properties":{"x":{"$ref":"#/$defs/A"}}},{"$defs":{"A":{"type":"string"}},"$ref":"#/$defs/A"}]}
            """##
        let expected =
            ##"{"items":[{"$ref":"#/$defs/A"},{"properties":{"x":{"$ref":"#/$defs/A_2"}}},{"$ref":"#/$defs/A"}],"##
            + #""$defs":{"A":{"type":"string"},"A_2":{"type":"integer"}}}"#
        #expect(try text(schema) == expected)
    }

    @Test func dataIsNotASchema() throws {
        for data in [##""const":{"x-order":["a"]}"##, ##""default":{"$ref":"#/$defs/A"}"##, ##""enum":[{"$defs":1}]"##] {
            #expect(try text("{\(data)}") == "{\(data)}")
        }
        let names = #"{"properties":{"$defs":{"type":"string"},"x-order":{"type":"null"}}}"#
        #expect(try text(names) == names)
    }

    @Test func aSchemaThatRefersToItself() throws {
        let schema = ##"{"$defs":{"T":{"properties":{"next":{"$ref":"#/$defs/T"},"top":{"$ref":"#"}}}},"$ref":"#/$defs/T"}"##
        let expected = ##"{"$ref":"#/$defs/T","$defs":{"T":{"properties":{"next":{"$ref":"#/$defs/T"},"top":{"$ref":"#"}}}}}"##
        #expect(try text(schema) == expected)
    }
}
